# SPDX-License-Identifier: Apache-2.0
"""The supervisor of one job: forks its ranks and its store, watches them, leaves none of them.

One process per job, forked from the server. It is the subreaper of everything the ranks start, so
when the job ends every process below it is known and killed. It has one thread; ranks are watched
and signalled through pidfds, so no signal can hit a process that took over a number.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import socket
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from typing import NoReturn

from megatron_moevement.cli.job_end import RecordedEnds
from megatron_moevement.settings.launch import LAUNCH_VARIABLE
from megatron_moevement.settings.secret import SECRET_VARIABLE, new_secret
from tests.harness.fork_server_orphans import await_orphans, children
from tests.harness.fork_server_protocol import (
    Event,
    JobSpec,
    OnRankFailure,
    TargetKind,
    receive,
    send,
)
from tests.harness.fork_server_rank import run_rank

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def die_with_parent() -> None:
    """Has the kernel kill the calling process when its parent ends."""
    parent = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def supervise(job: JobSpec, connection: socket.socket) -> NoReturn:
    """Runs a job to its end and ends the process; called in the freshly forked supervisor."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the server ignores it
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        _Supervisor(job, connection).run()
        code = 0
    except ConnectionError:
        code = 0  # the test process is gone: nobody waits for the job
    except Exception as error:  # noqa: BLE001  (told to the test process, which raises it)
        send(connection, {"event": Event.FAILED.value, "reason": f"{error!r}"})
    finally:
        _kill_descendants()
        os._exit(code)


class _Supervisor:
    """Watches the ranks of one job."""

    def __init__(self, job: JobSpec, connection: socket.socket) -> None:
        self._job = job
        self._connection = connection
        self._selector = selectors.DefaultSelector()
        self._pidfds: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._secret = job.env.get(SECRET_VARIABLE) or new_secret()
        self._deadline = time.monotonic() + job.timeout_s
        self._aborting = False
        self._ends = RecordedEnds(job.arguments if job.target.kind is TargetKind.PROGRAM else ())

    def run(self) -> None:
        """Starts the ranks and returns when the last one has ended and nothing is left."""
        os.environ[LAUNCH_VARIABLE] = self._ends.launch
        listeners = [socket.create_server(("127.0.0.1", 0), backlog=1024) for _ in range(2)]
        address, (_, control_port) = (listener.getsockname() for listener in listeners)
        for rank in range(self._job.world_size):
            self._start_rank(rank, address, control_port, listeners)
        stores = {_fork_store(listener, self._connection) for listener in listeners}
        for listener in listeners:
            listener.close()
        self._selector.register(self._connection, selectors.EVENT_READ, None)
        pids = [self._pids[rank] for rank in range(self._job.world_size)]
        send(
            self._connection,
            {
                "event": Event.STARTED.value,
                "pids": pids,
                "store_address": list(address),
                "control_port": control_port,
                "secret": self._secret,
            },
        )
        while self._pidfds:
            self._step()
        self._selector.close()
        orphans = await_orphans(stores, self._job.orphans_s)
        _kill_descendants()
        send(self._connection, {"event": Event.JOB_ENDED.value, "orphans": orphans})

    def _start_rank(
        self,
        rank: int,
        address: tuple[str, int],
        control_port: int,
        listeners: Sequence[socket.socket],
    ) -> None:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            die_with_parent()
            for listener in listeners:
                listener.close()
            self._connection.close()
            self._selector.close()
            for pidfd in self._pidfds.values():
                os.close(pidfd)
            run_rank(self._job, rank, address, control_port, self._secret)
        pidfd = os.pidfd_open(pid)
        self._pids[rank] = pid
        self._pidfds[rank] = pidfd
        self._selector.register(pidfd, selectors.EVENT_READ, rank)

    def _step(self) -> None:
        events = self._selector.select(max(0.0, self._deadline - time.monotonic()))
        if not events:
            self._overdue()
        for key, _ in events:
            if key.data is None:
                self._obey()
            else:
                self._end_rank(key.data)

    def _overdue(self) -> None:
        self._deadline = time.monotonic() + self._job.abort_grace_s
        if self._aborting:
            self._signal_all(signal.SIGKILL)
            return
        self._aborting = True
        send(self._connection, {"event": Event.TIMED_OUT.value})
        self._signal_all(signal.SIGABRT)

    def _obey(self) -> None:
        request = receive(self._connection)
        if request is None:
            raise ConnectionResetError("the test process is gone")
        pidfd = self._pidfds.get(request["rank"])
        if pidfd is not None:
            signal.pidfd_send_signal(pidfd, request["signal"])

    def _end_rank(self, rank: int) -> None:
        pidfd = self._pidfds.pop(rank)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(self._pids[rank], 0)
        code = os.waitstatus_to_exitcode(status)
        self._ends.record(rank, self._pids[rank], code)
        send(self._connection, {"event": Event.RANK_ENDED.value, "rank": rank, "exit_code": code})
        if code != 0 and self._job.on_rank_failure is OnRankFailure.STOP_JOB:
            self._signal_all(signal.SIGKILL)

    def _signal_all(self, number: signal.Signals) -> None:
        for pidfd in self._pidfds.values():
            signal.pidfd_send_signal(pidfd, number)


def _fork_store(listener: socket.socket, connection: socket.socket) -> int:
    """Forks the process that hosts a TCPStore of the job on a socket that listens already.

    The ranks may connect before it runs: the kernel queues them.

    Returns:
        The process.
    """
    pid = os.fork()
    if pid != 0:
        return pid
    try:
        die_with_parent()
        connection.close()
        import torch.distributed as dist  # noqa: PLC0415  (preloaded by the server)

        host, port = listener.getsockname()
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=listener.detach(),
        )
        while store is not None:
            signal.pause()
    except BaseException:  # noqa: BLE001  (nothing may reach the supervisor's frames)
        traceback.print_exc()
    finally:
        os._exit(1)


def _kill_descendants() -> None:
    """Kills and reaps every process below this one, until there is none."""
    while left := children():
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        for pid in left:
            os.waitpid(pid, 0)
