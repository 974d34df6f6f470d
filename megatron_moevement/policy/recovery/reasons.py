# SPDX-License-Identifier: Apache-2.0
"""Reasons: why a plan is what it is, in one line."""

from __future__ import annotations

from megatron_moevement.policy.facts.facts import Facts
from megatron_moevement.policy.recovery.stage_status import Survey
from megatron_moevement.policy.window.schedule import Window


def stage_names(stages: tuple[int, ...]) -> str:
    """Returns stages as words."""
    return ("stage " if len(stages) == 1 else "stages ") + ", ".join(map(str, stages))


def resume_reason(survey: Survey, rolling: int) -> str:
    """Returns why nobody replays.

    Args:
        survey: says that every stage can go on from the target.
    """
    forward = f", {_ranks(rolling)} forward to it" if rolling else ""
    copies = survey.copies()
    if not copies:
        return f"all ranks hold step {survey.target}{forward}"
    stages = tuple(sorted({copy.rank.pp for copy in copies}))
    count = f"{len(copies)} rank{'s' if len(copies) > 1 else ''}"
    return (
        f"{stage_names(stages)} lost state of {count}, replicas hold step {survey.target}{forward}"
    )


def _ranks(count: int) -> str:
    return "1 rank rolls" if count == 1 else f"{count} ranks roll"


def replay_reason(facts: Facts, survey: Survey, scope: set[int], window: Window) -> str:
    """Returns why stages replay."""
    without = [stage for stage in survey.behind if survey.progress[stage] is None]
    lost = [stage for stage in without if stage not in survey.gaps]
    grown = sorted(scope.difference(survey.behind))
    parts = []
    if lost:
        parts.append(f"{stage_names(tuple(lost))} lost state")
    if survey.gaps:
        parts.append(f"{stage_names(tuple(sorted(survey.gaps)))} must capture a lost slot again")
    unfinished = tuple(stage for stage in survey.behind if stage not in without)
    if unfinished:
        parts.append(f"{stage_names(unfinished)} had not finished replaying")
    if grown:
        parts.append(f"{stage_names(tuple(grown))} joined: log incomplete, or tied")
    copies = survey.copies(scope)
    if copies:
        stages = tuple(sorted({copy.rank.pp for copy in copies}))
        parts.append(f"{stage_names(stages)} copied from replicas")
    if facts.layout.pp == 1:
        parts.append("one stage only, so nothing is local")
    return f"{'; '.join(parts)}; from the window of step {window.start}"


def done_again(durable: int, lost: int | None) -> str:
    """Returns how many steps a rollback loses, as far as anybody knows."""
    if lost is None:
        return f"all steps after {durable} are done again"
    if lost == 0:
        return "no step is lost"
    return f"{lost} step{'s are' if lost > 1 else ' is'} done again"
