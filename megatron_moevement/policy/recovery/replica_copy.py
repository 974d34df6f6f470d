# SPDX-License-Identifier: Apache-2.0
"""Replica copies: which lost states a survivor holds, bit for bit, so that nobody has to replay.

Ranks with the same name in their facts train the same operators on the same reduced gradients and
hold all of their state. What may differ between them is what no gradient decides: the random
streams. So a copy is taken only of a state of which the job learnt that these were alike.

Source: none; the paper always replays.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from megatron_moevement.policy.copies.persistence import SlotKey, slot_keys
from megatron_moevement.policy.facts.facts import Condition, Facts, LiveState, ProcessFacts
from megatron_moevement.policy.facts.slot_gaps import first_in_flight
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.recovery.plan import StateCopy
from megatron_moevement.policy.window.schedule import Window

_LOST = {Condition.TORN, Condition.ABSENT}


@dataclasses.dataclass(frozen=True)
class ReplicaCopies:
    """What could be copied instead of replayed.

    Attributes:
        stand_ins: for each of these ranks own slots of the source for slots that nobody has.
        gaps: stages where a slot is lost with the state, and no replica has one that is the same.
    """

    by_rank: Mapping[LogicalRank, StateCopy] = dataclasses.field(default_factory=dict)
    stand_ins: Mapping[LogicalRank, tuple[SlotKey, ...]] = dataclasses.field(default_factory=dict)
    gaps: frozenset[int] = frozenset()

    def stand_ins_of(
        self, copies: Iterable[StateCopy]
    ) -> Mapping[LogicalRank, tuple[SlotKey, ...]]:
        """Returns the slots of replicas that ranks take along with some copies."""
        return {copy.rank: self.stand_ins[copy.rank] for copy in copies}


def find_copies(facts: Facts, target: int, persisted: Window | None) -> ReplicaCopies:
    """Returns the lost states that survivors hold at the target, and from whom each is taken.

    Args:
        facts: what the processes published, by their number.
        persisted: the job's newest persisted window; slots from it on are still needed.
    """
    alike = {step for process in facts.processes for step in process.rng_equal_steps}
    if target not in alike:
        return ReplicaCopies()
    sources: dict[str, list[ProcessFacts]] = defaultdict(list)
    for process in facts.by_rank.values():
        if process.replica_id is not None and _comes_to(process.live, target):
            sources[process.replica_id].append(process)
    first = first_in_flight(facts) if persisted is None else persisted.start
    held = _held_steps(facts, first)
    load: Counter[int] = Counter()
    copies: dict[LogicalRank, StateCopy] = {}
    stand_ins: dict[LogicalRank, tuple[SlotKey, ...]] = {}
    gaps = set()
    for rank, process in sorted(facts.by_rank.items()):
        if process.live.condition not in _LOST or process.replica_id not in sources:
            continue
        missing = set(range(first, target)) - held[rank]
        choices = [
            (len(missing) - len(slots), load[source.process], source.process, slots)
            for source in sources[process.replica_id]
            for slots in [_replica_slots(source, first, missing & alike)]
        ]
        lacking, _, source_process, slots = min(choices)
        load[source_process] += 1
        copies[rank], stand_ins[rank] = StateCopy(rank, source_process), slots
        if lacking:
            gaps.add(rank.pp)
    return ReplicaCopies(copies, stand_ins, frozenset(gaps))


def _comes_to(live: LiveState, target: int) -> bool:
    """Returns whether a live state is S_target, or rolls forward to it."""
    if live.condition is not Condition.DENSE:
        return False
    return live.step == target or live.step + 1 == live.finished == target


def _held_steps(facts: Facts, first: int) -> defaultdict[LogicalRank, set[int]]:
    """Returns for each rank the steps whose slot any process has, in windows from a step on."""
    held: defaultdict[LogicalRank, set[int]] = defaultdict(set)
    for process in facts.processes:
        for holding in process.holdings:
            if holding.window.start >= first:
                held[holding.owner].update(
                    holding.window.step_of(slot)
                    for slot in range(holding.window.size)
                    if holding.slots >> slot & 1
                )
    return held


def _replica_slots(source: ProcessFacts, first: int, steps: set[int]) -> tuple[SlotKey, ...]:
    """Returns the own slots of a process at some steps, by step."""
    found = {
        key.step: key
        for holding in source.holdings
        if holding.owner == source.rank and holding.window.start >= first
        for key in slot_keys(holding.owner, holding.window, holding.slots)
    }
    return tuple(found[step] for step in sorted(steps & found.keys()))
