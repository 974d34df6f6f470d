# SPDX-License-Identifier: Apache-2.0
"""Policies: those decisions of the simulated ranks that a mutation or a test exchanges.

The defaults are the ones that production takes; all others are called where they are taken. What
the model has of its own is marked: exchanging it shows that a check of the model can fail.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence

from megatron_moevement.policy.copies import commit, persistence, placement, retention, slot_ring
from megatron_moevement.policy.copies import left_stores as adoption
from megatron_moevement.policy.copies.peer_trouble import Remedy, Trouble
from megatron_moevement.policy.copies.retention import Retention
from megatron_moevement.policy.copies.slot_ring import Extent
from megatron_moevement.policy.facts.facts import Facts
from megatron_moevement.policy.job.operators import OperatorId
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.preflight.forecast import Cluster
from megatron_moevement.policy.recovery import recovery_planner as recovery
from megatron_moevement.policy.recovery.lifecycle import Action
from megatron_moevement.policy.recovery.plan import Plan
from megatron_moevement.policy.watching.measurements import Reduced
from megatron_moevement.policy.window.schedule import Window, WindowSchedule
from megatron_moevement.policy.window.timetable import (
    Proposal,
    Timetable,
    TimetableEntry,
    agreed_version,
    schedule_vote,
)
from megatron_moevement.testing.world.scheduling import Proposed
from megatron_moevement.testing.world.step_model import (
    ROLL_FORWARD_SECTION,
    Command,
    Section,
)
from megatron_moevement.testing.world.tokens import Counts, added


def adopts(timetable: Timetable, proposed: Proposed, step: int, rank: LogicalRank) -> Timetable:
    """Returns what a rank goes by once the barrier of a step agreed on a schedule."""
    del rank
    proposal, schedule = proposed
    return timetable.adopted(proposal.schedule_version, schedule, step, proposal.decision)


def reduced_counts(told: Mapping[LogicalRank, Counts | None], rank: LogicalRank) -> Counts | None:
    """Returns the tokens that all ranks have counted, as one hears it; None if one has not."""
    del rank
    counts = [each for each in told.values() if each is not None]
    return added(*counts) if len(counts) == len(told) else None


def heard(own: Reduced, greatest: Reduced) -> Reduced:
    """Returns what a rank goes by of all ranks' measurements."""
    del own
    return greatest


def slot_contents(
    schedule: WindowSchedule, rank: LogicalRank, slot: int
) -> tuple[frozenset[OperatorId], frozenset[OperatorId]]:
    """Returns what a rank captures as FULL and as COMPUTE: on all replicas the same."""
    own = frozenset(operator.id for operator in schedule.inventory.by_rank[rank])
    return schedule.full[slot] & own, schedule.compute[slot] & own


@dataclasses.dataclass(frozen=True)
class Policies:
    """The decisions, by what they are about; the first six are the model's own.

    Attributes:
        training_step: the order of a step.
        roll_forward_section: the order of a commit that a recovery makes up for.
        votes_suffice: whether so many of so many votes end the commit barrier.
        adopts: from when on a rank goes by a schedule.
        reduced_counts: what a rank learns of the tokens that all have counted.
        heard: what a rank learns of what all have measured.
    """

    training_step: tuple[Command, ...] = tuple(Command)
    roll_forward_section: tuple[Section, ...] = ROLL_FORWARD_SECTION
    votes_suffice: Callable[[int, int], bool] = operator.eq
    adopts: Callable[[Timetable, Proposed, int, LogicalRank], Timetable] = adopts
    reduced_counts: Callable[..., Counts | None] = reduced_counts
    heard: Callable[[Reduced, Reduced], Reduced] = heard
    schedule_of: Callable[[Timetable, Window], TimetableEntry] = Timetable.of
    schedule_vote: Callable[[Timetable, Proposal | None], tuple[int, int]] = schedule_vote
    agreed_version: Callable[[tuple[int, int]], int | None] = agreed_version
    carrying_out: tuple[Action, ...] = tuple(Action)
    may_vote: Callable[..., bool] = commit.may_vote
    extent_of: Callable[..., Extent] = slot_ring.extent_of
    place_of: Callable[..., Extent] = slot_ring.place_of
    moved_together: Callable[..., tuple[Mapping[int, Extent], Extent]] = slot_ring.moved_together
    is_current: Callable[[int, int], bool] = commit.is_current
    coverage_vote: Callable[[int, int], tuple[int, int]] = commit.coverage_vote
    agreed_coverage: Callable[[Sequence[int]], tuple[int, int]] = commit.agreed_coverage
    adopts_in: Callable[..., bool] = adoption.adopts_in
    share_of_flushed: Callable[..., tuple[int, ...]] = adoption.share_of_flushed
    acknowledgements: type[persistence.Acknowledgements] = persistence.Acknowledgements
    remedy: Callable[[Trouble, float], Remedy] = Trouble.remedy
    retain: Callable[[Window | None, int], Retention] = retention.retain
    slot_contents: Callable[
        [WindowSchedule, LogicalRank, int], tuple[frozenset[OperatorId], frozenset[OperatorId]]
    ] = slot_contents
    plan_start: Callable[[Facts], Plan | None] = recovery.plan_start
    place_replicas: Callable[..., placement.Placement] = placement.place_replicas
    waiting: Callable[[Cluster, int], tuple[placement.Host, ...]] = Cluster.waiting
