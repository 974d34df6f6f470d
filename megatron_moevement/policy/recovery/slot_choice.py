"""Slot choice: which slots each rank lacks, and from which processes it gets them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.facts.facts import Facts
from megatron_moevement.policy.job.ranks import Layout, LogicalRank
from megatron_moevement.policy.recovery.plan import WindowFetch
from megatron_moevement.policy.recovery.stage_status import persisted_of
from megatron_moevement.policy.window.schedule import Window

Wanted = Mapping[tuple[LogicalRank, LogicalRank, Window], int]
"""For a rank, the owner of slots and a window: the slots that the rank is to have, as bits."""


def choose_fetches(facts: Facts, wanted: Wanted) -> tuple[WindowFetch, ...]:
    """Chooses sources for slots, by what the processes published.

    A rank takes what its own process has; the rest comes from the holders with the least to send.

    Returns:
        By rank and window, those of the slots that anybody has.
    """
    load: Counter[int] = Counter()
    chosen: list[WindowFetch] = []
    for (rank, owner, window), slots in sorted(wanted.items()):
        mine = facts.by_rank[rank].process
        for having, found in _by_sources(facts.copies.get(owner, {}).get(window, {}), slots):
            # What another process sends is chosen slot by slot, so that all have the same to send.
            for part in (found,) if mine in having else _bits(found):
                sources = sorted(having, key=lambda one: (one != mine, load[one], one))
                load[sources[0]] += sources[0] != mine
                chosen.append(WindowFetch(rank, owner, window, part, tuple(sources)))
    return tuple(chosen)


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


def is_somewhere(wanted: Wanted, fetches: Iterable[WindowFetch]) -> bool:
    """Returns whether all wanted slots have a source."""
    found = sum(fetch.slots.bit_count() for fetch in fetches)
    return found == sum(slots.bit_count() for slots in wanted.values())


def slots_to_load(layout: Layout, window: Window, begins: Mapping[int, int]) -> Wanted:
    """Returns what ranks load that convert a window.

    Args:
        begins: for each of their stages k of the S_k that they begin with.
    """
    return {
        (rank, rank, window): (1 << window.size) - (1 << min(begin - window.start, window.size))
        for stage, begin in begins.items()
        for rank in layout.stage_ranks(stage)
    }


def slots_to_complete(
    facts: Facts, begins: Mapping[int, int], stand_ins: Iterable[tuple[LogicalRank, SlotKey]]
) -> Wanted:
    """Returns what ranks are to have that go on from their states, as far as anybody has it.

    That is slots of windows from the persisted one on. The slot of the state itself is captured
    unless the rank's own process has it.

    Args:
        begins: for each stage of such ranks k of the S_k that they go on from.
        stand_ins: what replicas have of the slots that nobody has.
    """
    persisted = persisted_of(facts)
    wanted: dict[tuple[LogicalRank, LogicalRank, Window], int] = {}
    for rank, key in stand_ins:
        name = rank, key.owner, key.window
        wanted[name] = wanted.get(name, 0) | 1 << key.slot
    for rank, windows in facts.copies.items():
        begin = begins.get(rank.pp)
        if begin is None:
            continue
        for window, copies in windows.items():
            if begin < window.start or (persisted is not None and window < persisted):
                continue
            now, held = 1 << begin - window.start, 0
            for slots in copies.values():
                held |= slots
            own = copies.get(facts.by_rank[rank].process, 0)
            slots = held & (now - 1) | own & now
            if slots:
                wanted[rank, rank, window] = slots
    return wanted


def both(one: Wanted, other: Wanted) -> Wanted:
    """Returns the slots that are in either."""
    return {name: one.get(name, 0) | other.get(name, 0) for name in {**one, **other}}


def _bits(slots: int) -> Iterator[int]:
    while slots:
        bit = slots & -slots
        yield bit
        slots ^= bit
