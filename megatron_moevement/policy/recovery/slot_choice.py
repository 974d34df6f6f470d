# SPDX-License-Identifier: Apache-2.0
"""Slot choice: which slots each rank lacks, and from which processes it gets them."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.facts.facts import Facts
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.recovery.plan import RankPlan, SlotFetch, SlotsFetch
from megatron_moevement.policy.recovery.stage_status import persisted_of
from megatron_moevement.policy.window.schedule import Window

Copies = Mapping[Window, Mapping[int, int]]
"""For each window of a rank: the processes that have slots of it, and which, as bits."""

Slots = tuple[tuple[Window, int], ...]
"""Windows of a rank, and which of their slots are meant, as bits."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The slots that ranks are to have in their rings before training goes on.

    Attributes:
        begins: for each stage whose ranks go on from their states k of that S_k. They are to have
            the slots of windows from the persisted one on, as far as anybody has them. The slot of
            the state itself is captured unless the rank's own process has it.
        window: what other stages convert.
        loads: for each of these which of its slots a rank loads, as bits.
        stand_ins: for some ranks what replicas have of the slots that nobody has.
    """

    begins: Mapping[int, int]
    window: Window | None = None
    loads: Mapping[int, int] = dataclasses.field(default_factory=dict)
    stand_ins: Mapping[LogicalRank, Sequence[SlotKey]] = dataclasses.field(default_factory=dict)

    def can_load(self, facts: Facts) -> bool:
        """Returns whether somebody has each slot that is loaded."""
        window = self.window
        return window is None or not any(
            slots & ~_union(facts.copies(rank).get(window, {}))
            for rank in facts.by_rank
            if (slots := self.loads.get(rank.pp, 0))
        )

    def of(
        self, rank: LogicalRank, process: int, copies: Copies, persisted: Window | None
    ) -> Mapping[tuple[LogicalRank, Window], int]:
        """Returns those of one rank, as bits, by their owner and window.

        Args:
            process: its own.
            copies: of its slots.
            persisted: the job's newest persisted window.
        """
        wanted: Counter[tuple[LogicalRank, Window]] = Counter()
        if self.window is not None and rank.pp in self.loads:
            wanted[rank, self.window] = self.loads[rank.pp]
        if rank.pp in self.begins:
            for window, having in copies.items():
                if persisted is None or window >= persisted:
                    wanted[rank, window] |= _to_complete(
                        window, self.begins[rank.pp], having, process
                    )
        for key in self.stand_ins.get(rank, ()):
            wanted[key.owner, key.window] |= 1 << key.slot
        return wanted


def _to_complete(window: Window, begin: int, having: Mapping[int, int], process: int) -> int:
    """Returns which slots of a window a rank is to have that goes on from S_begin."""
    if begin < window.start:
        return 0
    now = 1 << begin - window.start
    return _union(having) & (now - 1) | having.get(process, 0) & now


def _union(having: Mapping[int, int]) -> int:
    return functools.reduce(operator.or_, having.values(), 0)


def slots_to_load(window: Window, begins: Mapping[int, int]) -> Mapping[int, int]:
    """Returns for each stage that converts a window which of its slots a rank loads, as bits.

    Args:
        begins: for each of them k of the S_k that it begins with.
    """
    return {
        stage: (1 << window.size) - (1 << min(begin - window.start, window.size))
        for stage, begin in begins.items()
    }


def choose_fetches(facts: Facts, wanted: Wanted) -> tuple[SlotsFetch, ...]:
    """Chooses sources for slots, by what the processes published.

    A rank takes what its own process has; the rest comes from the holders with the least to send.

    Returns:
        By rank, those of the slots that anybody has.
    """
    load: Counter[int] = Counter()
    chosen: list[SlotsFetch] = []
    known: dict[Slots, Slots] = {}  # most ranks are to have the same ones of their own
    persisted = persisted_of(facts)
    for rank in sorted(facts.by_rank):
        mine, copies = facts.by_rank[rank].process, facts.copies(rank)
        parts: dict[tuple[LogicalRank, tuple[int, ...]], list[tuple[Window, int]]] = {}
        for (owner, window), slots in sorted(wanted.of(rank, mine, copies, persisted).items()):
            all_having = (copies if owner == rank else facts.copies(owner)).get(window, {})
            for having, together in _by_sources(all_having, slots):
                # What others send is chosen slot by slot, so that all have the same to send.
                for part in (together,) if mine in having else _bits(together):
                    order = tuple(sorted(having, key=lambda one: (one != mine, load[one], one)))
                    load[order[0]] += order[0] != mine
                    parts.setdefault((owner, order), []).append((window, part))
        for (owner, sources), found in parts.items():
            shared = known.setdefault(tuple(found), tuple(found))
            chosen.append(SlotsFetch(rank, owner, shared, sources))
    return tuple(chosen)


def held_steps(own: RankPlan, process: int, has: Callable[[SlotKey], bool]) -> set[int]:
    """Returns the steps of the slots that a rank need not get, as they lie in its ring.

    Args:
        process: its own.
        has: whether its ring has a slot.
    """
    mine = (fetch for fetch in own.fetches if fetch.source == process)
    return {each.slot.step for each in mine if each.slot.owner == own.rank and has(each.slot)}


def fetches_in_order(own: RankPlan, held: Collection[int]) -> tuple[SlotFetch, ...]:
    """Returns the slots that a rank gets, in the order in which they get their places.

    Each gets its place by the slot before it, or after it where there is none. So that none takes
    the room of another, those behind the oldest one that is there are placed upwards, then those in
    front of it downwards. Where none is there the oldest that brings a place is the first: one of a
    replica brings none.

    Args:
        held: steps of those that are there.
    """
    lacking = [fetch for fetch in own.fetches if fetch.slot.step not in held]
    with_place = (fetch.slot.step for fetch in lacking if fetch.slot.owner == own.rank)
    oldest = min(held) if held else next(with_place, 0)
    in_front = [fetch for fetch in lacking if fetch.slot.step < oldest]
    return (*lacking[len(in_front) :], *reversed(in_front))


def _by_sources(copies: Mapping[int, int], slots: int) -> Iterator[tuple[list[int], int]]:
    """Yields slots with the processes that have them, those that the same ones have together."""
    while slots:
        lowest = slots & -slots
        having, together = [], slots
        for process, held in copies.items():
            if held & lowest:
                having.append(process)
                together &= held
            else:
                together &= ~held
        if having:
            yield having, together
        slots &= ~together


def _bits(slots: int) -> Iterator[int]:
    while slots:
        bit = slots & -slots
        yield bit
        slots ^= bit
