# SPDX-License-Identifier: Apache-2.0
"""Holders: which process kept which rank's window when a recovery began, from its facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_moevement.policy.facts.facts import Facts
from megatron_moevement.policy.window.schedule import Window

DRAWN = 64
"""Of more ranks than this only the fewest copies are reported."""


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
