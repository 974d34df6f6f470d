# SPDX-License-Identifier: Apache-2.0
"""The fork server itself: imports once what every rank needs, then forks a supervisor per job.

Started by `fork_server.ForkServer` as `python -m`; no part of its module is imported elsewhere.
A process with several threads can't be forked safely, so the server checks that it has one.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys

from tests.harness.fork_server_protocol import (
    PACKET_BYTES,
    Event,
    JobSpec,
    send,
)
from tests.harness.fork_server_supervisor import supervise


def _preload(hooks: list[str]) -> None:
    """Imports each `module`, or imports and calls each `module:function`."""
    for hook in hooks:
        module_name, _, name = hook.partition(":")
        module = importlib.import_module(module_name)
        if name:
            getattr(module, name)()


def _require_one_thread() -> None:
    threads = os.listdir("/proc/self/task")
    if len(threads) == 1:
        return
    names = []
    for thread in threads:
        with open(f"/proc/self/task/{thread}/comm", encoding="utf-8") as comm:
            names.append(comm.read().strip())
    raise RuntimeError(
        f"the fork server has {len(names)} threads after its preload hooks ({', '.join(names)}); "
        "a hook must run no operation and start no thread"
    )


def _serve(control: socket.socket) -> None:
    while True:
        packet, descriptors, _, _ = socket.recv_fds(control, PACKET_BYTES, 1)
        if not packet:
            return
        connection = socket.socket(fileno=descriptors[0])
        if os.fork() == 0:
            control.close()
            supervise(JobSpec.read(packet.decode()), connection)
        connection.close()


def main(arguments: list[str]) -> None:
    """Serves until the test process closes its end of the control socket.

    Args:
        arguments: descriptor number of the control socket, then the preload hooks.
    """
    control = socket.socket(fileno=int(arguments[0]))
    control.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the test process's
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps supervisors
    try:
        _preload(arguments[1:])
        _require_one_thread()
    except Exception as error:  # noqa: BLE001  (told to the test process, which raises it)
        send(control, {"event": Event.FAILED.value, "reason": f"{error!r}"})
        return
    # What was imported lives for ever: kept out of the collector, its pages stay shared.
    gc.collect()
    gc.freeze()
    send(control, {"event": Event.STARTED.value, "pids": [os.getpid()]})
    _serve(control)


if __name__ == "__main__":
    main(sys.argv[1:])
