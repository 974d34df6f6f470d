# SPDX-License-Identifier: Apache-2.0
"""Tiers: a persisted window of the whole job on slower storage, which outlives all memory.

Each rank writes its part under a name that is used once. A tier counts once its manifest is there,
which names one part of each rank; a part's name has the checksum of what it says, and that has the
checksum of its slots.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from megatron_moevement.policy.document import Document
from megatron_moevement.policy.facts.facts import Condition, Facts
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.recovery.plan import Plan, Verdict
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.policy.window.timetable import Timetable

_NAME = re.compile(r"era(\d{1,19})-step(\d{1,19})-([0-9a-f]{16})")
_PART = re.compile(r"(pp\d+\.dp\d+\.tp\d+\.cp\d+\.ep\d+)-([0-9a-f]{16})-(\d{1,19})\.json")


class TierName(NamedTuple):
    """Names a tier: what ranks write under one name belongs together. A newer one is greater.

    Attributes:
        rollbacks: how many rollbacks to a durable checkpoint lie behind the state.
        committed: k, the step to which a launch replays: the one after the last slot, with which
            the window was persisted at the earliest.
        writers: stands for the generation of the job that wrote it, as 16 hexadecimal digits.
    """

    rollbacks: int
    committed: int
    writers: str

    def __str__(self) -> str:
        return f"era{self.rollbacks}-step{self.committed}-{self.writers}"

    @classmethod
    def parse(cls, name: str) -> TierName:
        """Returns the name that `str` made a text of.

        Raises:
            ValueError: it is none.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"{name!r} names no tier")
        return cls(int(match[1]), int(match[2]), match[3])

    @classmethod
    def of(cls, rollbacks: int, window: Window, writers: str) -> TierName:
        """Returns the name of a window's tier, from its first slot on."""
        return cls(rollbacks, window.last + 1, writers)


class PartName(NamedTuple):
    """Names the part of one rank.

    Attributes:
        checksum: of the file of this name.
        size_bytes: of the slots that it describes.
    """

    rank: LogicalRank
    checksum: int
    size_bytes: int

    def __str__(self) -> str:
        return f"{self.rank}-{self.checksum:016x}-{self.size_bytes}.json"

    @classmethod
    def parse(cls, name: str) -> PartName:
        """Returns the name that `str` made a text of.

        Raises:
            ValueError: it is none.
        """
        match = _PART.fullmatch(name)
        if match is None:
            raise ValueError(f"{name!r} names no part of a tier")
        return cls(LogicalRank.parse(match[1]), int(match[2], 16), int(match[3]))


@dataclasses.dataclass(frozen=True)
class Manifest(Document):
    """Declares a tier whole.

    Attributes:
        parts: one of each rank.
    """

    name: TierName
    window: Window
    parts: tuple[PartName, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the slots of all ranks."""
        return sum(part.size_bytes for part in self.parts)

    def part_of(self, rank: LogicalRank) -> PartName | None:
        """Returns the part of a rank; None where the manifest names none."""
        return next((part for part in self.parts if part.rank == rank), None)


def is_due(timetable: Timetable, window: Window, interval: int) -> bool:
    """Returns whether a persisted window is written: all ranks find the same, each by itself.

    Args:
        interval: N: the first window under each schedule, and every N-th after it.
    """
    entry = timetable.of(window)
    return (window.start - entry.first_step) // entry.window % interval == 0


def parts_of_all(
    there: Iterable[PartName], ranks: Collection[LogicalRank]
) -> tuple[PartName, ...] | None:
    """Returns the parts that a manifest names; None while that of a rank is lacking.

    Args:
        there: parts that are written.
        ranks: all of the job.
    """
    of_rank: Mapping[LogicalRank, PartName] = {part.rank: part for part in sorted(there)}
    if not of_rank.keys() >= set(ranks):
        return None
    return tuple(of_rank[rank] for rank in sorted(ranks))


def of_no_use(
    whole: Collection[TierName],
    begun: Collection[TierName],
    awaited: Collection[TierName],
    now: TierName,
    keep: int,
) -> tuple[TierName, ...]:
    """Returns which tiers are removed, oldest first: all but the newest whole ones.

    Args:
        whole: those that have a manifest.
        begun: those of which anything is there.
        awaited: those of which parts are still to come.
        now: the newest that this rank has been given; others, or those of a newer generation, may
            be at a later one already.
        keep: how many whole ones stay.
    """
    later = {name for name in begun if name >= now}
    kept = {*sorted(whole)[-keep:], *awaited, *later}
    return tuple(sorted({*whole, *begun} - kept))


class Reached(NamedTuple):
    """What a start of a job comes to without a tier.

    Attributes:
        rollbacks: of the history that it goes on with; None where it loads what is durable.
    """

    rollbacks: int | None
    step: int


def reached_by(plan: Plan | None, durable: int) -> Reached:
    """Returns what a plan comes to without training again since the durable checkpoint.

    Args:
        plan: None where a launch loads what is durable, or begins.
        durable: step of the newest durable checkpoint.
    """
    if plan is None or plan.verdict is Verdict.ROLLBACK or plan.is_from_durable:
        return Reached(None, durable)
    return Reached(plan.rollbacks, plan.target)


def may_begin_with_tier(facts: Facts, plan: Plan | None) -> bool:
    """Returns whether a generation may go on from a tier: no state that trains is given up for it.

    That is so when a job is launched, in restarts until it has brought a state back, and where the
    plan gives up all states for what is durable.
    """
    return reached_by(plan, facts.durable).rollbacks is None or all(
        process.live.condition is Condition.ABSENT for process in facts.processes
    )


def newer_than(whole: Iterable[TierName], reached: Reached) -> tuple[TierName, ...]:
    """Returns the tiers that lead further than anything else does, the newest first."""
    if reached.rollbacks is None:
        found = [name for name in whole if name.committed > reached.step]
    else:
        found = [name for name in whole if name[:2] > (reached.rollbacks, reached.step)]
    return tuple(sorted(found, reverse=True))


def trained_again(plan: Plan | None, name: TierName) -> int | None:
    """Returns how many committed steps are done again after a tier; None where no process knows.

    Args:
        plan: without the tier.
    """
    if plan is None or plan.lost_steps is None or reached_by(plan, 0).rollbacks is not None:
        return None
    return max(0, plan.target + plan.lost_steps - name.committed)


def is_reported(failures: int) -> bool:
    """Returns whether one of several failures in a row is: the first, second, fourth, and so on."""
    return failures.bit_count() == 1
