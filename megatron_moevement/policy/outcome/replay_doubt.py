# SPDX-License-Identifier: Apache-2.0
"""What follows from a replay that differed from the first time: other copies, or an end.

Where the job promised the same bits, a wrong state is never trained on. The next replay passes over
the copies that this one began with, wherever there are others. Nothing is removed: where no copy is
left that was not tried, the job ends with everything that it has in memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from enum import Enum

from megatron_moevement.policy.copies.persistence import SlotKey, slot_keys
from megatron_moevement.policy.facts.facts import Facts, ProcessFacts
from megatron_moevement.policy.job.guarantee import Level
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.recovery.plan import Origin, Plan

Trusted = Mapping[LogicalRank, frozenset[tuple[int, SlotKey]]]
"""Of ranks whose replay differed, the copies to begin with next: each with the process it is in."""


@dataclasses.dataclass(frozen=True)
class Doubt:
    """What the replay of one rank began with.

    Attributes:
        sources: for each slot that it loaded, the process that it came from.
        others: for each of these slots the processes that have another copy.
        is_kept: whether it went on from what an interrupted replay had reached.
    """

    sources: Mapping[SlotKey, int]
    others: Mapping[SlotKey, frozenset[int]]
    is_kept: bool = False

    @property
    def replaceable(self) -> Mapping[SlotKey, int]:
        """The loaded slots with their sources, as far as there is another copy."""
        return {key: source for key, source in self.sources.items() if self.others[key]}

    @property
    def may_be_mended(self) -> bool:
        """Whether another attempt would begin with something else."""
        return self.is_kept or bool(self.replaceable)


def doubt_of(plan: Plan, rank: LogicalRank) -> Doubt:
    """Returns what the replay of a rank began with."""
    origin = plan.origin(rank.pp)
    if origin is not Origin.WINDOW:
        return Doubt({}, {}, is_kept=origin is Origin.KEPT)
    loaded = plan.fetches_of(rank)
    return Doubt(
        {fetch.slot: fetch.source for fetch in loaded},
        {fetch.slot: frozenset(fetch.sources[1:]) for fetch in loaded},
    )


def trusted_copies(facts: Facts, plan: Plan, rank: LogicalRank) -> frozenset[tuple[int, SlotKey]]:
    """Returns the copies that the next replay of a rank may begin with.

    A copy that came to a process during the replay that differed may be one of what was tried: only
    those count that were there before it. What a process captured again lies in its own ring.
    """
    tried = doubt_of(plan, rank).replaceable
    own, newest = facts.by_rank[rank].process, max((key.window for key in tried), default=None)
    return frozenset(
        (process.process, key)
        for process in facts.processes
        for holding in process.holdings
        if holding.owner == rank
        for key in slot_keys(holding.owner, holding.window, holding.slots)
        if tried.get(key) != process.process
        and not (process.process == own and newest is not None and key.window > newest)
    )


def within(process: ProcessFacts, trusted: Trusted) -> ProcessFacts:
    """Returns what a process has but for copies that are not trusted."""
    holdings = []
    for held in process.holdings:
        slots = held.slots
        if held.owner in trusted:
            known = trusted[held.owner]
            keys = slot_keys(held.owner, held.window, held.slots)
            slots = sum(1 << key.slot for key in keys if (process.process, key) in known)
        if slots or not held.slots:
            holdings.append(dataclasses.replace(held, slots=slots))
    return dataclasses.replace(process, holdings=tuple(holdings))


class Consequence(Enum):
    """What follows from the proof of a recovery's replays."""

    GO_ON = "go on"
    """Nothing differed, or no bits were promised."""

    AGAIN = "again"
    """Another replay, from other copies."""

    STOP = "stop"
    """The job ends with its memory kept."""


def consequence_of(level: Level, doubts: Iterable[Doubt]) -> Consequence:
    """Returns what follows where replays differed from the first time.

    Args:
        level: that the job had when they began.
    """
    found = list(doubts)
    if not found or level is Level.CONSISTENT:
        return Consequence.GO_ON
    return Consequence.AGAIN if any(one.may_be_mended for one in found) else Consequence.STOP
