# SPDX-License-Identifier: Apache-2.0
"""Slot gaps: stages whose window in flight could never be completed by going on."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from megatron_moevement.policy.facts.facts import Facts
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import Window


def stages_with_gaps(
    facts: Facts,
    persisted: Window | None,
    steps: Mapping[int, int],
    apart: AbstractSet[LogicalRank] = frozenset(),
) -> frozenset[int]:
    """Returns the stages of which a slot in flight is nowhere intact.

    The state that such a slot captured has passed: only a replay can capture it again. A slot of
    the state that a rank holds now is not missed, it is captured as soon as the rank goes on.

    Args:
        persisted: the job's newest persisted window; the slots after it are in flight. Before a
            first window is persisted all slots are.
        steps: for each stage in question the step that its ranks hold.
        apart: ranks that are not looked at.
    """
    first = first_in_flight(facts) if persisted is None else persisted.last + 1
    found: dict[LogicalRank, int] = dict.fromkeys(
        (rank for rank in facts.by_rank if rank.pp in steps and rank not in apart), 0
    )
    for process in facts.processes:
        for holding in process.holdings:
            if holding.window.start >= first and holding.owner in found:
                found[holding.owner] |= holding.slots << (holding.window.start - first)
    wanted = {stage: (1 << max(step - first, 0)) - 1 for stage, step in steps.items()}
    return frozenset(rank.pp for rank, slots in found.items() if wanted[rank.pp] & ~slots)


def first_in_flight(facts: Facts) -> int:
    """Returns where the first window begins, before one is persisted.

    That is 0 when nothing is held: then nothing is missed.
    """
    starts = (holding.window.start for process in facts.processes for holding in process.holdings)
    return min(starts, default=0)
