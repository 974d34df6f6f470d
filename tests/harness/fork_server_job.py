# SPDX-License-Identifier: Apache-2.0
"""A running job of the fork server as the test process sees it, and how it ended."""

from __future__ import annotations

import dataclasses
import json
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_moevement.settings.secret import Secret
from tests.harness.fork_server_protocol import Event, JobSpec, receive, send

START_TIMEOUT_S = 120.0
"""For the server's imports, or for the fork of a job's ranks, on a busy machine."""
END_GRACE_S = 30.0
"""Time for the end of a job beyond its own limit; only a broken supervisor needs it."""
_POLL_S = 0.005
_TAIL_CHARACTERS = 4000


class JobFailedError(AssertionError):
    """A job did not do what the test took for granted; the message shows what the ranks said."""


@dataclasses.dataclass(frozen=True)
class RankResult:
    """How one rank ended."""

    rank: int
    exit_code: int
    """As `subprocess` has it: negative for a signal."""
    stdout: str
    stderr: str
    value: Any
    """What the function returned, through JSON; None for a program or a rank that failed."""


@dataclasses.dataclass(frozen=True)
class JobResult:
    """How a job ended."""

    ranks: tuple[RankResult, ...]
    timed_out: bool
    orphans: tuple[str, ...] = ()
    """Processes that outlived the ranks for longer than they may: name, number, open ports."""

    @property
    def exit_codes(self) -> tuple[int, ...]:
        """Exit codes in the order of the ranks."""
        return tuple(rank.exit_code for rank in self.ranks)

    @property
    def values(self) -> tuple[Any, ...]:
        """What the ranks returned, in their order."""
        return tuple(rank.value for rank in self.ranks)

    def check(self) -> JobResult:
        """Returns itself when all ranks ended with 0 in time.

        Raises:
            JobFailedError: a rank failed or the time was over; shows every rank that failed.
        """
        if self.timed_out or any(self.exit_codes):
            raise JobFailedError(self.describe())
        return self

    def describe(self) -> str:
        """Returns exit codes, and the end of what the failed ranks printed."""
        lines = [f"exit codes {self.exit_codes}" + (", timed out" if self.timed_out else "")]
        for rank in self.ranks:
            if rank.exit_code != 0:
                lines.append(f"--- rank {rank.rank}: exit code {rank.exit_code}, stdout:")
                lines.append(rank.stdout[-_TAIL_CHARACTERS:])
                lines.append(f"--- rank {rank.rank}: stderr:")
                lines.append(rank.stderr[-_TAIL_CHARACTERS:])
        return "\n".join(lines)


class Job:
    """A running job; used by one thread of the test process.

    Leaving it as a context manager kills what still runs.
    """

    def __init__(self, spec: JobSpec, connection: socket.socket) -> None:
        self._spec = spec
        self._connection = connection
        self._exit_codes: dict[int, int] = {}
        self._timed_out = False
        self._ended = False
        self._orphans: tuple[str, ...] = ()
        self.store_address = ("", 0)
        self.control_port = 0
        self.secret = Secret(b"")
        self.pids: tuple[int, ...] = ()
        self._read_until(lambda: bool(self.pids), START_TIMEOUT_S)

    @property
    def folder(self) -> Path:
        """The folder with the captured output of the ranks."""
        return Path(self._spec.folder)

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to one rank; a rank that has ended already gets nothing."""
        send(self._connection, {"rank": rank, "signal": int(number)})

    def stdout(self, rank: int) -> str:
        """Returns what a rank has printed so far."""
        return _text(self._spec.stdout_path(rank))

    def stderr(self, rank: int) -> str:
        """Returns what a rank has written to standard error so far."""
        return _text(self._spec.stderr_path(rank))

    def wait_for_output(self, rank: int, text: str) -> None:
        """Waits until a rank has printed `text` to standard output.

        Raises:
            JobFailedError: the job ended without it.
        """
        while text not in self.stdout(rank):
            if self._ended:
                reason = f"rank {rank} never printed {text!r}\n{self._result().describe()}"
                raise JobFailedError(reason)
            self._read_one(_POLL_S)

    @property
    def has_ended(self) -> bool:
        """Whether no process of the job is left, as far as was read."""
        return self._ended

    def poll(self) -> None:
        """Takes in what the supervisor has said meanwhile."""
        if not self._ended:
            self._read_one(_POLL_S)

    def wait_for_rank(self, rank: int) -> int:
        """Waits until one rank has ended and returns its exit code, negative for a signal."""
        self._read_until(lambda: rank in self._exit_codes, self._spec.timeout_s + END_GRACE_S)
        return self._exit_codes[rank]

    def wait(self) -> JobResult:
        """Waits for the end of the job; then no process of it is left."""
        self._read_until(lambda: self._ended, self._spec.timeout_s + END_GRACE_S)
        self._connection.close()
        return self._result()

    def close(self) -> None:
        """Kills what still runs and waits until it is gone."""
        if self._connection.fileno() < 0:
            return
        for rank in range(self._spec.world_size):
            if rank not in self._exit_codes and not self._ended:
                self.kill(rank)
        self.wait()

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _read_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                self._connection.close()  # the supervisor then kills the job
                raise JobFailedError(f"the supervisor of {self.folder} says nothing")
            self._read_one(remaining_s)

    def _read_one(self, timeout_s: float) -> None:
        """Takes in one message of the supervisor, or none when none comes in time."""
        self._connection.settimeout(timeout_s)
        try:
            message = receive(self._connection)
        except TimeoutError:
            return
        if message is None:
            self._connection.close()
            raise JobFailedError(f"the supervisor of {self.folder} is gone")
        match Event(message["event"]):
            case Event.STARTED:
                host, port = message["store_address"]
                self.store_address = (host, port)
                self.control_port = message["control_port"]
                self.secret = Secret(message["secret"].encode())
                self.pids = tuple(message["pids"])
            case Event.RANK_ENDED:
                self._exit_codes[message["rank"]] = message["exit_code"]
            case Event.TIMED_OUT:
                self._timed_out = True
            case Event.JOB_ENDED:
                self._orphans = tuple(message["orphans"])
                self._ended = True
            case Event.FAILED:
                self._connection.close()
                raise JobFailedError(f"the job could not run: {message['reason']}")

    def _result(self) -> JobResult:
        return JobResult(
            ranks=tuple(self._rank_result(rank) for rank in range(self._spec.world_size)),
            timed_out=self._timed_out,
            orphans=self._orphans,
        )

    def _rank_result(self, rank: int) -> RankResult:
        value = _text(self._spec.value_path(rank))
        return RankResult(
            rank=rank,
            exit_code=self._exit_codes[rank],
            stdout=self.stdout(rank),
            stderr=self.stderr(rank),
            value=json.loads(value) if value else None,
        )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
