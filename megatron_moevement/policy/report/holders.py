# SPDX-License-Identifier: Apache-2.0
"""Holders: which process keeps which rank's slots, and what it had of them, from facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_moevement.policy.facts.facts import Facts
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import Window

DRAWN = 64
"""Of more ranks than this only sums are reported."""

_Placed = tuple[int, tuple[int, ...]]
"""A rank's process, and those that keep its copies."""


def placements_document(facts: Iterable[tuple[float, Facts]]) -> list[dict[str, Any]]:
    """Returns which processes keep copies of each rank's slots, from when on.

    Args:
        facts: of each start and recovery, with its time in seconds, in the order of time.

    Returns:
        For each placement that differs from the one before: `at`, `generation`, and `ranks`, for
        each of them its process and those that keep its copies. Where there are many ranks, in
        place of `ranks` their number (`of`), how many of them have another process or other holders
        than before (`changed`), the fewest holders of one (`fewest`), and of how many one process
        keeps copies at most (`most`).
    """
    found: list[dict[str, Any]] = []
    former: dict[LogicalRank, _Placed] | None = None
    for at_s, each in facts:
        placed = {
            rank: (each.by_rank[rank].process, tuple(each.by_rank[rank].holders))
            for rank in each.layout.ranks
            if rank in each.by_rank
        }
        if placed == former:
            continue
        told = (
            _sums(placed, former)
            if each.layout.num_ranks > DRAWN
            else {"ranks": list(placed.values())}
        )
        found.append({"at": at_s, "generation": each.generation, **told})
        former = placed
    return found


def _sums(
    placed: Mapping[LogicalRank, _Placed], former: Mapping[LogicalRank, _Placed] | None
) -> dict[str, int]:
    """Returns what a placement of many ranks comes to."""
    kept = Counter(holder for _, holders in placed.values() for holder in holders)
    before = placed if former is None else former
    return {
        "of": len(placed),
        "changed": sum(
            placed.get(rank) != before.get(rank) for rank in placed.keys() | before.keys()
        ),
        "fewest": min((len(holders) for _, holders in placed.values()), default=0),
        "most": max(kept.values(), default=0),
    }


def holders_document(facts: Facts) -> dict[str, Any]:
    """Returns what each process had of the newest window that was persisted.

    Returns:
        `window`, the fewest whole copies of a rank's part of it (`copies`), and, where there are
        few ranks, `processes` and for each rank the slots that each process has, by number.
    """
    persisted = [one.persisted for one in facts.processes if one.persisted is not None]
    window = max(persisted, key=lambda one: one.start, default=None)
    held = [
        _slots(facts, number, window) if window is not None else {}
        for number in range(facts.layout.num_ranks)
    ]
    size = 0 if window is None else window.size
    found: dict[str, Any] = {
        "generation": facts.generation,
        "durable": facts.durable,
        "window": None if window is None else [window.start, window.last],
        "copies": min((sum(n == size for n in one.values()) for one in held), default=0),
    }
    if facts.layout.num_ranks > DRAWN:
        return found
    numbers = {rank: number for number, rank in enumerate(facts.layout.ranks)}
    found["processes"] = [
        {
            "process": one.process,
            "rank": None if one.rank is None else numbers[one.rank],
            "domain": one.domain,
            "condition": one.live.condition.value,
            "step": one.live.step,
            "committed": one.committed,
        }
        for one in sorted(facts.processes, key=lambda one: one.process)
    ]
    found["held"] = held
    return found


def _slots(facts: Facts, number: int, window: Window) -> Mapping[int, int]:
    """Returns how many slots of a rank's window each process has, by process."""
    copies = facts.copies(facts.layout.rank_at(number)).get(window, {})
    return {process: slots.bit_count() for process, slots in sorted(copies.items())}
