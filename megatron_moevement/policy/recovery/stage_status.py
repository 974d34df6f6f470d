# SPDX-License-Identifier: Apache-2.0
"""Survey: what is left of each stage's state, before any window is chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Set as AbstractSet

from megatron_moevement.policy.facts.facts import Facts
from megatron_moevement.policy.facts.slot_gaps import stages_with_gaps
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.job.segments import coupled_stages
from megatron_moevement.policy.recovery.plan import StateCopy
from megatron_moevement.policy.recovery.replica_copy import ReplicaCopies, find_copies
from megatron_moevement.policy.recovery.rollforward import Progress, find_progress, open_window
from megatron_moevement.policy.window.schedule import Window


@dataclasses.dataclass(frozen=True)
class Survey:
    """What the facts say about each stage, before any window is chosen.

    Attributes:
        progress: for each stage what its ranks can go on from; None where a state is lost, or is
            of no use because of a gap.
        gaps: stages of which a slot in flight is lost.
        found: lost states that could be copied; where a stage's ranks can go on, they can with
            these copies.
    """

    target: int
    progress: tuple[Progress | None, ...]
    gaps: frozenset[int] = frozenset()
    found: ReplicaCopies = dataclasses.field(default_factory=ReplicaCopies)

    @property
    def behind(self) -> tuple[int, ...]:
        """Stages that are not at the target."""
        return tuple(
            stage
            for stage, progress in enumerate(self.progress)
            if progress is None or progress.step < self.target or progress.window is not None
        )

    def copies(self, scope: AbstractSet[int] = frozenset()) -> tuple[StateCopy, ...]:
        """Returns the copies that are taken where some stages replay."""
        return tuple(
            copy
            for rank, copy in self.found.by_rank.items()
            if rank.pp not in scope and self.progress[rank.pp] is not None
        )


def survey_of(facts: Facts, target: int) -> Survey:
    """Returns how far each stage got; stages that step together are judged together."""
    found = find_copies(facts, target, persisted_of(facts))
    progress: dict[int, Progress | None] = {}
    for stage in range(facts.layout.pp):
        coupled = coupled_stages(facts.layout, facts.ends, stage)
        progress[stage] = next(
            (
                reached
                for together in (coupled, (stage,))
                for lost in (frozenset[LogicalRank](), found.by_rank.keys())
                if (reached := _progress_of(facts, stage, together, target, lost)) is not None
            ),
            None,
        )
    return Survey(target, tuple(progress.values()), found=found)


def without_gaps(facts: Facts, survey: Survey) -> Survey:
    """Returns the survey without the states that can't complete the window in flight."""
    steps = {stage: each.step for stage, each in enumerate(survey.progress) if each is not None}
    gaps = stages_with_gaps(facts, persisted_of(facts), steps, survey.found.by_rank.keys())
    gaps |= survey.found.gaps & steps.keys()
    progress = (None if stage in gaps else each for stage, each in enumerate(survey.progress))
    return dataclasses.replace(survey, progress=tuple(progress), gaps=gaps)


def _progress_of(
    facts: Facts,
    stage: int,
    together: tuple[int, ...],
    target: int,
    copied: AbstractSet[LogicalRank],
) -> Progress | None:
    """Returns how far a stage got, judged with those that step together with it.

    At a window's last slot one of them may have loaded it while another still waits for it. Some
    ranks may copy the state of others, which then must come to the target.
    """
    members = [process for other in together for process in facts.stage(other)]
    if len(members) < len(together) * facts.layout.ranks_per_stage:
        return None
    standing = [process for process in members if process.rank not in copied]
    progress = find_progress(standing, target)
    if progress is None:
        return None
    if copied and (progress.step, progress.window) != (target, None):
        return None
    window = open_window(facts.stage(stage), progress.step)
    return dataclasses.replace(progress, window=window)


def persisted_of(facts: Facts) -> Window | None:
    """Returns the job's newest persisted window, as far as anybody learnt of it."""
    learnt = [process.persisted for process in facts.processes if process.persisted is not None]
    return max(learnt, default=None)
