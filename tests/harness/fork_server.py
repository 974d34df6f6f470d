# SPDX-License-Identifier: Apache-2.0
"""Starts multi-process tests in a fraction of a second.

A server process imports torch (and what its preload hooks name) once. Each job forks its ranks
from it, so a rank is up in milliseconds and is fresh: a process of its own, in a session of its
own, that no other test has touched. The job's TCPStore lives outside of the ranks, on a socket
that listens before the first rank runs, so any rank may die and no port can be lost to a race.

    with ForkServer(preload=["torch.distributed"]) as server:
        result = server.run(train_a_bit, world_size=4, args=[10])

`fork_server_process` is the server, `fork_server_supervisor` watches one job, `fork_server_rank`
runs in the rank; `fork_server_job` is the job as the test process sees it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypedDict, Unpack

from tests.harness.fork_server_job import (
    END_GRACE_S,
    START_TIMEOUT_S,
    Job,
    JobFailedError,
    JobResult,
    RankResult,
)
from tests.harness.fork_server_protocol import (
    Event,
    JobSpec,
    OnRankFailure,
    Target,
    TargetKind,
    receive,
)

__all__ = [
    "ForkServer",
    "Job",
    "JobFailedError",
    "JobOptions",
    "JobResult",
    "OnRankFailure",
    "RankResult",
]


class JobOptions(TypedDict, total=False):
    """What a job may be given beyond its target and its size."""

    env: Mapping[str, str]
    """Environment variables on top of the launcher's own (RANK, WORLD_SIZE, MASTER_ADDR, ...)."""
    seed: int
    """Plus its rank, seeds `random`, numpy and torch of each rank; 0 by default."""
    timeout_s: float
    """Limit of the job; then each rank dumps its stacks and is killed. 60 by default."""
    abort_grace_s: float
    """How long ranks then get to dump their stacks. 5 by default."""
    orphans_s: float
    """How long processes that ranks have started may outlive them; then they are reported."""
    on_rank_failure: OnRankFailure
    """Whether the other ranks go on when one fails; by default they do."""


class ForkServer:
    """The server; one for a test session.

    Args:
        preload: what the server imports before it forks: `module` is imported,
            `module:function` is called as well. No hook may start a thread.
        env: set in the server, and so in every rank, on top of this process's environment.

    Raises:
        RuntimeError: a hook failed.
    """

    def __init__(
        self, preload: Sequence[str] = ("torch.distributed",), env: Mapping[str, str] | None = None
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="moevement_fork_server_"))
        self._jobs = 0
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A pool of threads, once started, makes forking unsafe; ranks are the parallelism here.
        one_thread = {f"{pool}_NUM_THREADS": "1" for pool in ("OMP", "MKL", "OPENBLAS")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__name__}_process", str(theirs.fileno()), *preload],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={
                **os.environ,
                **one_thread,
                "PYTHONPATH": os.pathsep.join(sys.path),
                **(env or {}),
            },
        )
        theirs.close()
        self._await_start()

    def _await_start(self) -> None:
        self._control.settimeout(START_TIMEOUT_S)
        try:
            message = receive(self._control)
            if message is None:
                raise RuntimeError("the fork server ended at its start; see standard error")
            if Event(message["event"]) is Event.FAILED:
                raise RuntimeError(f"the fork server's preload failed: {message['reason']}")
        except BaseException:
            self.close()
            raise

    def run(
        self,
        function: Callable[..., Any],
        *,
        world_size: int,
        args: Sequence[Any] = (),
        **options: Unpack[JobOptions],
    ) -> JobResult:
        """Runs `function(*args)` on `world_size` ranks and returns how they ended.

        Args:
            function: a function of a module; the ranks import that module.
            world_size: number of ranks.
            args: what JSON can hold.
            **options: see `JobOptions`.
        """
        with self.start(function, world_size=world_size, args=args, **options) as job:
            return job.wait()

    def start(
        self,
        function: Callable[..., Any],
        *,
        world_size: int,
        args: Sequence[Any] = (),
        **options: Unpack[JobOptions],
    ) -> Job:
        """Starts what `run` runs and returns while it runs."""
        target = _function_target(function)
        return self._start(target, list(args), world_size, options)

    def run_program(
        self,
        path: str | Path,
        argv: Sequence[str],
        *,
        world_size: int,
        **options: Unpack[JobOptions],
    ) -> JobResult:
        """Runs the script at `path` as `__main__` with the command line `argv` on every rank."""
        with self.start_program(path, argv, world_size=world_size, **options) as job:
            return job.wait()

    def start_program(
        self,
        path: str | Path,
        argv: Sequence[str],
        *,
        world_size: int,
        **options: Unpack[JobOptions],
    ) -> Job:
        """Starts what `run_program` runs and returns while it runs."""
        target = Target(TargetKind.PROGRAM, str(Path(path).resolve()))
        return self._start(target, list(argv), world_size, options)

    def _start(
        self, target: Target, arguments: list[Any], world_size: int, options: JobOptions
    ) -> Job:
        folder = self._folder / f"job{self._jobs}"
        self._jobs += 1
        folder.mkdir()
        spec = JobSpec(
            folder=str(folder),
            target=target,
            arguments=arguments,
            world_size=world_size,
            env=dict(options.get("env", {})),
            working_directory=os.getcwd(),
            import_path=[entry or os.getcwd() for entry in sys.path],
            seed=options.get("seed", 0),
            timeout_s=options.get("timeout_s", 60.0),
            abort_grace_s=options.get("abort_grace_s", 5.0),
            orphans_s=options.get("orphans_s", 0.0),
            on_rank_failure=options.get("on_rank_failure", OnRankFailure.CONTINUE),
        )
        spec.write()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._control, [str(folder).encode()], [theirs.fileno()])
        return Job(spec, ours)

    def close(self) -> None:
        """Ends the server and removes the output of its jobs."""
        self._control.close()
        self._process.wait(timeout=END_GRACE_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _function_target(function: Callable[..., Any]) -> Target:
    module, name = function.__module__, function.__qualname__
    if module == "__main__" or "." in name or "<" in name:
        raise ValueError(f"ranks can't import {module}:{name}; give a function of a module")
    return Target(TargetKind.FUNCTION, f"{module}:{name}")
