# SPDX-License-Identifier: Apache-2.0
"""What a freshly forked rank does: redirect its output, set its environment, run its target.

Runs in the rank's process only. A rank never returns into the code of the server it was forked
from: when its target is done it joins its threads and runs the exit handlers, as the interpreter
does at its end, and then leaves with `os._exit`.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import json
import os
import random
import resource
import runpy
import signal
import socket
import sys
import threading
import traceback
from typing import NoReturn

from tests.harness.fork_server_protocol import EXIT_RAISED, JobSpec, TargetKind


def run_rank(
    job: JobSpec, rank: int, store_address: tuple[str, int], control_port: int, secret: str
) -> NoReturn:
    """Runs the job's target as one rank and ends the process.

    Args:
        job: what to run.
        rank: the place of this process in the job.
        store_address: where the job's TCPStore listens.
        control_port: where the store of in-process restart listens.
        secret: of the job.
    """
    code = EXIT_RAISED
    try:
        _redirect_streams(job, rank)
        _set_environment(job, rank, store_address, control_port, secret)
        _seed(job.seed + rank)
        code = _run_target(job, rank)
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
        atexit._run_exitfuncs()  # noqa: SLF001
    except BaseException:  # noqa: BLE001  (nothing may reach the server's frames)
        traceback.print_exc()
        code = EXIT_RAISED
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _redirect_streams(job: JobSpec, rank: int) -> None:
    for descriptor, path in ((1, job.stdout_path(rank)), (2, job.stderr_path(rank))):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    # A rank that is killed must have left what it printed.
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", closefd=False)
    # The supervisor aborts a job that takes too long: then each rank says where it was.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    # What the server ignores.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _set_environment(
    job: JobSpec, rank: int, store_address: tuple[str, int], control_port: int, secret: str
) -> None:
    host, port = store_address
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        MASTER_ADDR=host,
        MASTER_PORT=str(port),
        MOEVEMENT_CONTROL_PORT=str(control_port),
        MOEVEMENT_SECRET=secret,
        # The store lives outside of the ranks; rank 0 must join it, not host another one.
        TORCHELASTIC_USE_AGENT_STORE="True",
        GLOO_SOCKET_IFNAME=_loopback_interface(),
        MOEVEMENT_FAILURE_DOMAIN=str(rank),
    )
    os.environ.update(job.env)
    os.chdir(job.working_directory)
    sys.path[:] = job.import_path


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return "lo" if "lo" in names else "lo0"


def _seed(seed: int) -> None:
    random.seed(seed)
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed(seed)
    if torch is not None:
        torch.manual_seed(seed)


def _run_target(job: JobSpec, rank: int) -> int:
    """Runs the target and returns the exit code that an interpreter would end with."""
    try:
        if job.target.kind is TargetKind.PROGRAM:
            _run_program(job.target.name, job.arguments)
        else:
            _call_function(job, rank)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)  # noqa: T201  (what the interpreter does)
        return EXIT_RAISED
    except Exception:  # noqa: BLE001  (what the interpreter does with an uncaught exception)
        traceback.print_exc()
        return EXIT_RAISED
    return 0


def _call_function(job: JobSpec, rank: int) -> None:
    module_name, _, name = job.target.name.partition(":")
    function = getattr(importlib.import_module(module_name), name)
    value = json.dumps(function(*job.arguments))
    path = job.value_path(rank)
    partial = path.with_suffix(".partial")
    partial.write_text(value, encoding="utf-8")
    os.replace(partial, path)


def _run_program(path: str, argv: list[str]) -> None:
    sys.argv = [path, *argv]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    runpy.run_path(path, run_name="__main__")
