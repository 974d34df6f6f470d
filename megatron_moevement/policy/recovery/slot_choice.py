"""Slot choice: which slots each rank lacks, and from which processes it gets them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.facts.facts import Facts, ProcessFacts
from megatron_moevement.policy.job.ranks import Layout, LogicalRank
from megatron_moevement.policy.recovery.plan import SlotFetch
from megatron_moevement.policy.recovery.stage_status import persisted_of
from megatron_moevement.policy.window.schedule import Window

Wanted = tuple[LogicalRank, SlotKey]
"""A rank, and a slot that it is to have."""


def choose_fetches(
    processes: Sequence[ProcessFacts], wanted: Iterable[Wanted]
) -> tuple[SlotFetch, ...]:
    """Chooses sources for slots, by what the processes published.

    A rank takes what its own process has; the rest comes from the holders with the least to send.

    Args:
        processes: what the live processes published.
        wanted: which ranks get which slots.

    Returns:
        By rank and step, those of the slots that anybody has.
    """
    holders: defaultdict[tuple[LogicalRank, Window], list[tuple[int, int]]] = defaultdict(list)
    own: dict[LogicalRank, int] = {}
    for facts in processes:
        if facts.rank is not None:
            own[facts.rank] = facts.process
        for holding in facts.holdings:
            holders[holding.owner, holding.window].append((facts.process, holding.slots))
    load: Counter[int] = Counter()
    chosen = []
    for rank, key in sorted(wanted, key=lambda one: (one[0], one[1].step)):
        having = [
            process for process, slots in holders[key.owner, key.window] if slots >> key.slot & 1
        ]
        if not having:
            continue
        mine = own.get(rank)
        having.sort(key=lambda process: (process != mine, load[process], process))
        load[having[0]] += having[0] != mine
        chosen.append(SlotFetch(rank, key, tuple(having)))
    return tuple(chosen)


def slots_to_load(layout: Layout, window: Window, begins: Mapping[int, int]) -> list[Wanted]:
    """Returns what ranks load that convert a window.

    Args:
        layout: sizes of the job.
        window: the window.
        begins: for each of their stages k of the S_k that they begin with.
    """
    return [
        (rank, SlotKey(rank, window, slot))
        for stage, begin in begins.items()
        for rank in layout.stage_ranks(stage)
        for slot in range(begin - window.start, window.size)
    ]


def slots_to_complete(
    facts: Facts, begins: Mapping[int, int], stand_ins: Iterable[Wanted]
) -> Iterator[Wanted]:
    """Yields what ranks are to have that go on from their states, as far as anybody has it.

    That is slots of windows from the persisted one on. The slot of the state itself is captured
    unless the rank's own process has it.

    Args:
        facts: what the live processes published.
        begins: for each stage of such ranks k of the S_k that they go on from.
        stand_ins: what replicas have of the slots that nobody has.
    """
    yield from stand_ins
    persisted = persisted_of(facts)
    held: Counter[tuple[LogicalRank, Window]] = Counter()
    own: Counter[tuple[LogicalRank, Window]] = Counter()
    for process in facts.processes:
        for holding in process.holdings:
            if persisted is None or holding.window >= persisted:
                held[holding.owner, holding.window] |= holding.slots
                if process.rank == holding.owner:
                    own[holding.owner, holding.window] |= holding.slots
    for (rank, window), slots in held.items():
        for slot in range(slots.bit_length() if rank.pp in begins else 0):
            captures = own[rank, window] if window.step_of(slot) == begins[rank.pp] else slots
            if captures >> slot & 1 and window.step_of(slot) <= begins[rank.pp]:
                yield rank, SlotKey(rank, window, slot)
