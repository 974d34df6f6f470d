# SPDX-License-Identifier: Apache-2.0
"""What the test process, the fork server and a job's supervisor say to each other.

Everything is JSON: a job is described by the file `job.json` of its folder, messages go as packets
over a Unix socket pair, and what a rank returns is a file. Nothing is ever unpickled.
"""

from __future__ import annotations

import dataclasses
import json
import socket
from enum import Enum
from pathlib import Path
from typing import Any

PACKET_BYTES = 1 << 16
"""Upper bound of one packet; the packets hold numbers and one path."""

EXIT_RAISED = 1
"""Exit code of a rank whose target raised."""


class TargetKind(Enum):
    """What a rank runs."""

    FUNCTION = "function"
    """`name` is a `package.module:function`, called with `arguments`; its result is the value."""
    PROGRAM = "program"
    """`name` is the path of a script, run as `__main__` with `arguments` as its command line."""


class OnRankFailure(Enum):
    """What becomes of the other ranks when one ends with an exit code other than 0."""

    CONTINUE = "continue"
    STOP_JOB = "stop_job"


@dataclasses.dataclass(frozen=True)
class Target:
    """What each rank of a job runs."""

    kind: TargetKind
    name: str


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """One job: the same target on `world_size` ranks."""

    folder: str
    target: Target
    arguments: list[Any]
    world_size: int
    env: dict[str, str]
    working_directory: str
    import_path: list[str]
    seed: int
    timeout_s: float
    abort_grace_s: float
    orphans_s: float
    on_rank_failure: OnRankFailure

    def write(self) -> None:
        """Writes the job to its folder.

        Raises:
            TypeError: an argument is nothing that JSON can hold.
        """
        fields = dataclasses.asdict(self)
        fields["target"]["kind"] = self.target.kind.value
        fields["on_rank_failure"] = self.on_rank_failure.value
        (Path(self.folder) / "job.json").write_text(json.dumps(fields), encoding="utf-8")

    @classmethod
    def read(cls, folder: str) -> JobSpec:
        """Reads the job of a folder."""
        fields = json.loads((Path(folder) / "job.json").read_text(encoding="utf-8"))
        target = fields["target"]
        fields["target"] = Target(**{**target, "kind": TargetKind(target["kind"])})
        fields["on_rank_failure"] = OnRankFailure(fields["on_rank_failure"])
        return cls(**fields)

    def stdout_path(self, rank: int) -> Path:
        """Returns the file that captures the standard output of a rank."""
        return Path(self.folder) / f"rank{rank}.stdout"

    def stderr_path(self, rank: int) -> Path:
        """Returns the file that captures the standard error of a rank."""
        return Path(self.folder) / f"rank{rank}.stderr"

    def value_path(self, rank: int) -> Path:
        """Returns the file with what the function of a rank returned."""
        return Path(self.folder) / f"rank{rank}.value.json"


class Event(Enum):
    """What a supervisor tells the test process."""

    STARTED = "started"
    """All ranks run; `pids` in the order of the ranks, the `store_address` of the job, the
    `control_port` of the store of in-process restart, and the `secret` of the job."""
    RANK_ENDED = "rank_ended"
    """`rank` ended with `exit_code`, negative for a signal."""
    TIMED_OUT = "timed_out"
    """The time is over; the ranks that still ran are being killed."""
    JOB_ENDED = "job_ended"
    """No process of the job is left; `orphans` that had to be killed, as text."""
    FAILED = "failed"
    """The job could not be started; `reason`."""


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Sends one packet."""
    connection.send(json.dumps(message).encode())


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """Returns the next packet, None when the other side is gone.

    Raises:
        TimeoutError: the socket has a timeout and nothing came.
    """
    try:
        packet = connection.recv(PACKET_BYTES)
    except ConnectionResetError:
        # The other side closed with a packet of ours unread: this comes before what it had sent.
        packet = connection.recv(PACKET_BYTES)
    if not packet:
        return None
    message: dict[str, Any] = json.loads(packet)
    return message
