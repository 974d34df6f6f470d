# SPDX-License-Identifier: Apache-2.0
"""Fault tolerance: which strategy protects a job, and what it may take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from enum import Enum
from typing import Any

from megatron_moevement.errors import UserError
from megatron_moevement.policy.copies.retention import LAG, largest_window, max_replayed_steps
from megatron_moevement.policy.window.ordering import Ordering
from megatron_moevement.settings.checks import Checks
from megatron_moevement.settings.flags import (
    AT_LEAST_1,
    PROBABILITY,
    Range,
    count,
    flag,
    not_negative,
    positive,
)

_ABOVE_1 = Range("above 1", lambda value: value > 1)


@dataclasses.dataclass(frozen=True)
class ScheduleChange:
    """A change of the window schedule.

    Attributes:
        step: that must be committed before it is proposed.
        window: W from then on.
    """

    step: int
    window: int


def parse_changes(text: str) -> tuple[ScheduleChange, ...]:
    """Returns the changes of a text such as `20:3,50:5`.

    Raises:
        ValueError: it is none, or steps don't ascend.
    """
    changes = []
    for part in text.split(","):
        step, _, window = part.partition(":")
        if not (step.isdigit() and window.isdigit() and int(window)):
            raise ValueError(f"{part!r} is no STEP:W with W at least 1")
        changes.append(ScheduleChange(int(step), int(window)))
    steps = [change.step for change in changes]
    if steps != sorted(set(steps)):
        raise ValueError(f"the steps of {text!r} don't ascend")
    return tuple(changes)


class Chosen(Enum):
    """A W that is no number."""

    AUTO = "auto"


_FIRST_CHOSEN = 4
"""W with which a job begins that chooses its own."""
_LARGEST_CHOSEN = 8
"""W that such a job comes to at most, unless a flag says otherwise."""


def parse_window(text: str) -> int | Chosen:
    """Returns the W of a text such as `4`, or AUTO of `auto`.

    Raises:
        ValueError: it is none.
    """
    if text == Chosen.AUTO.value:
        return Chosen.AUTO
    try:
        window = int(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is neither an integer nor auto") from error
    if not AT_LEAST_1.contains(window):
        raise ValueError(f"{text} is not {AT_LEAST_1.words}")
    return window


OFF = "off"
"""Names the strategy of a job that durable checkpoints alone protect."""


@dataclasses.dataclass(frozen=True)
class FaultTolerance:
    """Protection against the loss of processes and nodes."""

    moevement_strategy: str = flag(OFF, "how the job is protected")
    moevement_window: int | Chosen = flag(
        Chosen.AUTO,
        "sparse snapshots that make a sparse checkpoint (W); auto: as many as the measured "
        "bandwidths ask for, at any time",
        parse=parse_window,
        metavar="W|auto",
    )
    moevement_min_window: int | None = count(
        None,
        "smallest W that the job may come to: its slots are the largest (default: W, or 1)",
        metavar="W",
    )
    moevement_max_window: int | None = count(
        None,
        "largest W that the job may come to: memory is made for it (default: W, or 8)",
        metavar="W",
    )
    moevement_max_replay_steps: int | None = count(
        None, "most steps that a recovery replays: limits the largest W", metavar="STEPS"
    )
    moevement_schedule_changes: tuple[ScheduleChange, ...] = flag(
        (), "another W once a step is committed", parse=parse_changes, metavar="STEP:W,..."
    )
    moevement_order: Ordering = flag(
        Ordering.HARD,
        "by what experts are ordered in a window, the least used first: their number, tokens, "
        "probabilities, a moving average of tokens, tokens by capacity",
    )
    moevement_order_decay: float = flag(
        0.5,
        "how much of the former average each window leaves (decayed)",
        within=PROBABILITY,
        metavar="SHARE",
    )
    moevement_replicas: int = not_negative(
        2, "copies of every snapshot in other failure domains (r)", metavar="COPIES"
    )
    moevement_strict_replicas: bool = flag(
        False, "fail when there are too few failure domains for the copies"
    )
    moevement_failure_domain: str | None = flag(
        None, "what this process may be lost together with (default: its host)", metavar="NAME"
    )
    moevement_no_frozen_skip: bool = flag(
        False, "compute weight gradients of frozen operators in a replay, and drop them"
    )
    moevement_no_upstream_log: bool = flag(
        False, "don't log what crosses stage boundaries: a lost stage takes all others back with it"
    )
    moevement_no_replica_copy: bool = flag(
        False, "replay what is lost even where another rank still holds the same state"
    )
    moevement_no_adoption: bool = flag(
        False, "don't take over what a dead process left on the machine, but its copies alone"
    )
    moevement_recover_only: bool = flag(
        False, "save what a killed job left in memory as a checkpoint in --save, train nothing"
    )
    moevement_operators: str | None = flag(
        None, "write what is captured in which slot as JSON, train nothing", metavar="FILE"
    )
    moevement_store_dir: str | None = flag(
        None, "folder in memory for snapshots (default: /dev/shm/moevement-<uid>)", metavar="DIR"
    )
    moevement_tier_dir: str | None = flag(
        None,
        "write persisted windows to a folder that all ranks share, or to a URL that fsspec takes: "
        "where all memory is lost a launch goes on from there",
        metavar="DIR|URL",
    )
    moevement_tier_interval: int = count(
        1, "write every so many persisted windows there, of W steps each", metavar="WINDOWS"
    )
    moevement_tier_keep: int = count(
        2,
        "how many of them stay there, the oldest are removed",
        metavar="WINDOWS",
    )
    moevement_run_id: str | None = flag(
        None, "name of the run, under which a relaunch finds its snapshots", metavar="NAME"
    )
    moevement_host_memory_limit_gb: float | None = positive(
        None, "most host memory that a process takes for snapshots", metavar="GB"
    )
    moevement_replication_interface: str = flag(
        "127.0.0.1",
        "where snapshots are received: an address or an interface of this machine, with "
        "{local_rank} in it or several by commas one for each local rank",
        metavar="ADDRESS",
    )
    moevement_audit_interval: int | None = count(
        None,
        "compare what ranks with the same state captured, every so many steps",
        metavar="STEPS",
    )
    moevement_slow_rank_factor: float = flag(
        2.0,
        "report a rank that computes so many times longer than the median",
        within=_ABOVE_1,
        metavar="TIMES",
    )

    @property
    def is_on(self) -> bool:
        """Whether anything beyond durable checkpoints protects the job."""
        return self.moevement_strategy != OFF

    @property
    def chooses_window(self) -> bool:
        """Whether the job chooses its W while it trains."""
        return self.moevement_window is Chosen.AUTO

    @property
    def first_window(self) -> int:
        """The W that the job begins with, unless the model is too small for it."""
        if isinstance(self.moevement_window, Chosen):
            return min(max(_FIRST_CHOSEN, self.min_window), self._largest_window)
        return self.moevement_window

    @property
    def first_windows(self) -> Sequence[int]:
        """W that the job may begin with, the first one where no slot of it would be empty."""
        least = self.min_window if self.chooses_window else self.first_window
        return range(self.first_window, least - 1, -1)

    @property
    def min_window(self) -> int:
        """The smallest W that there is room for."""
        given = self.moevement_window
        return self.moevement_min_window or (1 if isinstance(given, Chosen) else given)

    @property
    def max_window(self) -> int:
        """The largest W that there is room for.

        How many steps may be replayed does not decide it: that may change between launches, and
        the memory that they find may not.
        """
        if self.moevement_max_window is not None:
            return self.moevement_max_window
        if not isinstance(self.moevement_window, Chosen):
            return self.moevement_window
        return max(_LARGEST_CHOSEN, self.moevement_min_window or 1)

    @property
    def windows(self) -> range:
        """W, as the job may come to it: there is room, and few enough steps are replayed."""
        return range(self.min_window, self._largest_window + 1)

    @property
    def _largest_window(self) -> int:
        steps = self.moevement_max_replay_steps
        return (
            self.max_window if steps is None else min(self.max_window, largest_window(steps, LAG))
        )

    @property
    def changes(self) -> tuple[ScheduleChange, ...]:
        """The schedules that are wanted in the course of the job, from its first step on."""
        return (ScheduleChange(0, self.first_window), *self.moevement_schedule_changes)

    @property
    def automatic(self) -> FaultTolerance:
        """The same of a job that chooses its W, between limits of its own where W was fixed."""
        is_fixed = not self.chooses_window and self.min_window == self.max_window
        limits: dict[str, Any] = {}
        if is_fixed:
            limits = {"moevement_min_window": None, "moevement_max_window": None}
        return dataclasses.replace(
            self, moevement_window=Chosen.AUTO, moevement_schedule_changes=(), **limits
        ).resolved()

    def resolved(self) -> FaultTolerance:
        """Returns the same with the limits of W that follow from other flags."""
        return dataclasses.replace(
            self, moevement_min_window=self.min_window, moevement_max_window=self.max_window
        )

    def of_process(self, local_rank: int) -> FaultTolerance:
        """Returns the same with the interface of one process of a machine."""
        places = self.moevement_replication_interface.split(",")
        place = places[local_rank % len(places)].replace("{local_rank}", str(local_rank))
        return dataclasses.replace(self, moevement_replication_interface=place)

    @property
    def host_memory_limit_bytes(self) -> int | None:
        """Most host memory that a process takes for snapshots; None: no limit."""
        limit_gb = self.moevement_host_memory_limit_gb
        return None if limit_gb is None else round(limit_gb * 1e9)

    @property
    def makes_copies(self) -> bool:
        """Whether processes keep snapshots of others."""
        return self.is_on and self.moevement_replicas > 0 and not self.moevement_recover_only


def check_fault_tolerance(settings: FaultTolerance, save: str | None) -> None:
    """Checks what can be checked without the other ranks.

    Raises:
        UserError: a name can't be that of a folder, or a flag lacks another one.
    """
    checks = Checks()
    checks.passes(_check_windows, settings)
    if settings.moevement_recover_only and not settings.is_on:
        checks.refuse(
            "--moevement-recover-only recovers what a strategy left in memory: give "
            "--moevement-strategy moevement, and the other flags of the job"
        )
    if settings.moevement_recover_only and save is None:
        checks.refuse("--moevement-recover-only saves a checkpoint: give --save DIR")
    if settings.moevement_tier_dir is not None and not settings.is_on:
        checks.refuse(
            "--moevement-tier-dir has windows of a strategy: give --moevement-strategy moevement, "
            "or leave it out"
        )
    name = settings.moevement_run_id
    if name is not None and (not name or "/" in name or name.startswith(".")):
        checks.refuse(
            f"--moevement-run-id {name!r} is no name for a folder: use letters, digits and dashes"
        )
    checks.end()


def _check_windows(settings: FaultTolerance) -> None:
    most, changes = settings.moevement_max_replay_steps, settings.changes
    needed = settings.min_window
    if not settings.chooses_window:
        needed = max(change.window for change in changes)
    replayed = max_replayed_steps(needed, LAG)
    if most is not None and replayed > most:
        raise UserError(
            f"windows of {needed} let a recovery replay {replayed} steps, more than "
            f"--moevement-max-replay-steps {most} allows: the largest W is "
            f"{largest_window(most, LAG)}"
        )
    limits = range(settings.min_window, settings.max_window + 1)
    for change in changes:
        if change.window not in limits:
            raise UserError(
                f"W = {change.window} is not between --moevement-min-window "
                f"{settings.min_window} and --moevement-max-window {settings.max_window}"
            )
    if settings.chooses_window and settings.moevement_schedule_changes:
        raise UserError(
            "--moevement-window auto, the default, chooses the W that follows: leave "
            "--moevement-schedule-changes out, or give --moevement-window W"
        )
