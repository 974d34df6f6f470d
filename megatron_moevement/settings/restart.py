# SPDX-License-Identifier: Apache-2.0
"""In-process restart: the flags of Megatron-LM for it, and the order that their times must have."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from enum import Enum

from megatron_moevement.errors import UserError
from megatron_moevement.settings.checks import Checks
from megatron_moevement.settings.flags import count, flag, not_negative, seconds


class Granularity(Enum):
    """What is given up when one process is lost."""

    NODE = "node"
    """All processes of its failure domain; spares of another domain take their ranks."""

    RANK = "rank"
    """The process alone: of a node that is lost, each process takes a spare."""


@dataclasses.dataclass(frozen=True)
class InProcessRestart:
    """Restarts within living processes after the loss of some; times are in seconds."""

    inprocess_restart: bool = flag(False, "survivors of a fault go on without ending their process")
    inprocess_max_iterations: int | None = count(
        None, "restarts before the job stops (default: no limit)", metavar="RESTARTS"
    )
    inprocess_monitor_thread_interval: float = seconds(
        1.0, "between two looks of a process at whether others are interrupted"
    )
    inprocess_monitor_process_interval: float = seconds(
        1.0, "between two looks at whether the process lives"
    )
    inprocess_progress_watchdog_interval: float = seconds(
        1.0, "between two signs of life of the training thread"
    )
    inprocess_heartbeat_interval: float = seconds(30.0, "between two heartbeats of a process")
    inprocess_soft_timeout: float = seconds(60.0, "without progress until a process is interrupted")
    inprocess_hard_timeout: float = seconds(90.0, "without progress until a process is killed")
    inprocess_heartbeat_timeout: float = seconds(
        60.0, "without a heartbeat until a process counts as lost"
    )
    inprocess_barrier_timeout: float = seconds(
        120.0, "that survivors wait for each other at a restart"
    )
    inprocess_completion_timeout: float = seconds(
        120.0, "that processes wait for each other at the end"
    )
    inprocess_last_call_wait: float = not_negative(
        1.0, "that others have to report faults at the same time", metavar="SECONDS"
    )
    inprocess_termination_grace_time: float = not_negative(
        1.0, "between SIGTERM and SIGKILL of a process that hangs", metavar="SECONDS"
    )
    inprocess_granularity: Granularity = flag(
        Granularity.RANK, "what is given up with a lost process"
    )
    inprocess_active_world_size: int | None = count(
        None,
        "processes that train; the others are warm spares (default: as the launcher sets it)",
        metavar="PROCESSES",
    )
    inprocess_empty_cuda_cache: bool = flag(
        False, "give unused cached GPU memory back at every restart"
    )

    def active_ranks(self, processes: int, launched: int) -> int:
        """Returns how many processes train.

        Args:
            processes: of the job, spares counted.
            launched: how many of them the launcher wants to train.

        Raises:
            UserError: there are fewer, or spares that nobody would ever bring in.
        """
        active = self.inprocess_active_world_size or launched
        if active > processes:
            raise UserError(
                f"--inprocess-active-world-size {active}: the job has {processes} processes"
            )
        if active < processes and not self.inprocess_restart:
            raise UserError(
                f"{processes - active} of {processes} processes are spares, and nothing would "
                "bring them in: give --inprocess-restart, or start none"
            )
        return active

    @property
    def times(self) -> dict[str, timedelta]:
        """All times, by their fields' names without `inprocess_`; no other field is a float."""
        return {
            field.name.removeprefix("inprocess_"): timedelta(seconds=getattr(self, field.name))
            for field in dataclasses.fields(self)
            if isinstance(field.default, float)
        }


_SMALLER = (
    ("soft_timeout", "hard_timeout"),
    ("hard_timeout", "barrier_timeout"),
    ("heartbeat_timeout", "barrier_timeout"),
    ("heartbeat_interval", "heartbeat_timeout"),
    ("monitor_process_interval", "heartbeat_timeout"),
    ("monitor_process_interval", "soft_timeout"),
    ("monitor_thread_interval", "soft_timeout"),
    ("progress_watchdog_interval", "soft_timeout"),
)
"""The first must be less than the second, or a healthy process would be taken for a lost one."""


def check_restart(settings: InProcessRestart) -> None:
    """Checks that the times fit together.

    Raises:
        UserError: one must be less than another one and is not.
    """
    checks = Checks()
    if not settings.inprocess_restart:
        return
    times = settings.times
    for smaller, larger in _SMALLER:
        if times[smaller] >= times[larger]:
            checks.refuse(
                f"{_shown(settings, smaller)} must be less than {_shown(settings, larger)}"
            )
    checks.end()


def _shown(settings: InProcessRestart, name: str) -> str:
    seconds = settings.times[name].total_seconds()
    return f"--inprocess-{name.replace('_', '-')} {seconds:g}"
