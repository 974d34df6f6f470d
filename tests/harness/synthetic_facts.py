# SPDX-License-Identifier: Apache-2.0
"""What the processes of a synthetic run publish at the start of a recovery."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from megatron_moevement.policy.facts.facts import Condition, Facts, Holding, LiveState, ProcessFacts
from megatron_moevement.policy.job.ranks import Layout
from megatron_moevement.policy.job.segments import Ends
from megatron_moevement.policy.window.schedule import Window


def facts_of(
    layout: Layout,
    *,
    places: Mapping[int, int],
    new: Collection[int],
    step: int,
    window: Window | None,
    host_of: Callable[[int], str],
) -> Facts:
    """Returns facts of a job whose window is kept by each rank and the first ones of two stages.

    Args:
        places: by rank the process that occupies it.
        new: ranks whose processes have just come in, with nothing.
        step: that the survivors have committed.
        window: the newest persisted one.
    """
    distance = layout.ranks_per_stage
    whole = 0 if window is None else (1 << window.size) - 1
    processes = []
    for rank, process in places.items():
        owners = [(rank - distance * each) % layout.num_ranks for each in range(3)]
        held = [Holding(layout.rank_at(one), window, whole) for one in owners if window is not None]
        is_new = rank in new
        live = LiveState(Condition.ABSENT) if is_new else LiveState(Condition.DENSE, step)
        processes.append(
            ProcessFacts(
                process=process,
                domain=host_of(process),
                rank=layout.rank_at(rank),
                committed=None if is_new else step,
                live=live,
                persisted=None if is_new else window,
                holdings=() if is_new else tuple(held),
                is_new=is_new,
                holders=_holders(layout, places, rank),
            )
        )
    return Facts(0, layout, Ends.INDEPENDENT, 0, tuple(processes))


def _holders(layout: Layout, places: Mapping[int, int], rank: int) -> tuple[int, ...]:
    """Returns the processes that keep copies for a rank: those of the next two stages."""
    ranks = [(rank + layout.ranks_per_stage * each) % layout.num_ranks for each in (1, 2)]
    return tuple(dict.fromkeys(places[one] for one in ranks if one != rank))
