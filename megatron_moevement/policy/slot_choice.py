"""Slot choice: from which process each rank loads each slot of a window."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from megatron_moevement.policy.facts import ProcessFacts
from megatron_moevement.policy.plan import SlotSources
from megatron_moevement.policy.ranks import LogicalRank
from megatron_moevement.policy.schedule import Window


def choose_sources(
    processes: Sequence[ProcessFacts], window: Window, wanted: Mapping[LogicalRank, int]
) -> tuple[SlotSources, ...] | None:
    """Chooses a source for every slot that has to be loaded, by what the processes say they hold.

    A rank takes what its own process has; the rest comes from the holders with the least to send.

    Args:
        processes: what the live processes published, by their number.
        window: the window that is replayed from.
        wanted: for each rank that loads the first slot it needs; it needs all after it too.

    Returns:
        The sources by rank, None when nobody has one of the slots.
    """
    holders: dict[LogicalRank, list[tuple[int, int]]] = {rank: [] for rank in wanted}
    own: dict[LogicalRank, int] = {}
    for facts in processes:
        for holding in facts.holdings:
            if holding.window != window or holding.owner not in holders:
                continue
            if facts.rank == holding.owner:
                own[holding.owner] = facts.process
            holders[holding.owner].append((facts.process, holding.slots))
    load: Counter[int] = Counter()
    chosen = []
    for rank in sorted(wanted):
        sources = []
        for slot in range(wanted[rank], window.size):
            having = [process for process, slots in holders[rank] if slots >> slot & 1]
            if not having:
                return None
            if own.get(rank) in having:
                sources.append(own[rank])
                continue
            source = min(having, key=lambda process: (load[process], process))
            load[source] += 1
            sources.append(source)
        chosen.append(SlotSources(rank, wanted[rank], tuple(sources)))
    return tuple(chosen)
