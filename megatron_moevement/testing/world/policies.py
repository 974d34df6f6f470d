"""Policies: every decision that the simulated ranks take, as functions that can be exchanged.

The defaults are the real ones. A mutation exchanges one of them for a wrong one, to show that the
invariants notice.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Collection, Iterable, Sequence

from megatron_moevement.policy import (
    adoption,
    commit,
    edges,
    eras,
    persistence,
    placement,
    recovery,
    retention,
    rollforward,
)
from megatron_moevement.policy.facts import Facts
from megatron_moevement.policy.operators import OperatorId
from megatron_moevement.policy.peer_trouble import Remedy, Trouble
from megatron_moevement.policy.plan import Plan
from megatron_moevement.policy.ranks import LogicalRank
from megatron_moevement.policy.retention import Retention
from megatron_moevement.policy.schedule import Window, WindowSchedule
from megatron_moevement.testing.world.step_model import (
    ROLL_FORWARD_SECTION,
    TRAINING_STEP,
    Command,
)


def slot_contents(
    schedule: WindowSchedule, rank: LogicalRank, slot: int
) -> tuple[frozenset[OperatorId], frozenset[OperatorId]]:
    """Returns what a rank captures as FULL and as COMPUTE: on all replicas the same."""
    own = frozenset(operator.id for operator in schedule.inventory.by_rank[rank])
    return schedule.full(slot) & own, schedule.compute(slot) & own


@dataclasses.dataclass(frozen=True)
class Policies:
    """The decisions, by what they are about."""

    training_step: tuple[Command, ...] = TRAINING_STEP
    roll_forward_section: tuple[Command, ...] = ROLL_FORWARD_SECTION
    settling: tuple[rollforward.Settling, ...] = rollforward.SETTLING
    votes_suffice: Callable[[int, int], bool] = operator.eq
    may_vote: Callable[..., bool] = commit.may_vote
    is_current: Callable[[int, int], bool] = commit.is_current
    newest_persisted: Callable[[Window | None, Window | None], Window | None] = (
        commit.newest_persisted
    )
    coverage_vote: Callable[[int, int], tuple[int, int]] = commit.coverage_vote
    agreed_coverage: Callable[[Sequence[int]], tuple[int, int]] = commit.agreed_coverage
    adopts_in: Callable[..., bool] = adoption.adopts_in
    share_of_flushed: Callable[..., tuple[int, ...]] = adoption.share_of_flushed
    may_forget_left: Callable[..., bool] = adoption.may_forget_left
    of_no_use: Callable[[Collection[int], Collection[int]], tuple[int, ...]] = adoption.of_no_use
    acknowledgements: type[persistence.Acknowledgements] = persistence.Acknowledgements
    trouble_after: Callable[[Trouble | None, float, float, str], Trouble] = Trouble.after
    remedy: Callable[[Trouble, float], Remedy] = Trouble.remedy
    retain: Callable[[Window | None, int], Retention] = retention.retain
    slot_contents: Callable[
        [WindowSchedule, LogicalRank, int], tuple[frozenset[OperatorId], frozenset[OperatorId]]
    ] = slot_contents
    has_no_use_of_memory: Callable[[Facts], bool] = recovery.has_no_use_of_memory
    plan_start: Callable[[Facts], Plan | None] = recovery.plan_start
    next_era: Callable[[Iterable[int], float], int] = eras.next_era
    windows_start: Callable[[Plan, Facts], int] = edges.windows_start
    place_replicas: Callable[..., placement.Placement] = placement.place_replicas
