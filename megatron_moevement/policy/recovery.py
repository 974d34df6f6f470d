"""Recovery: from the facts of a generation to the plan that all its processes carry out.

Source: sections 3.2 (sparse-to-dense conversion) and 3.3 (upstream logging), and the appendix on
concurrent failures. Two things go further than there: a stage that an earlier, interrupted recovery
brought part of the way goes on from there, and a neighbour whose log does not reach back joins.
"""

from __future__ import annotations

import dataclasses

from megatron_moevement.policy.eras import of_newest_era
from megatron_moevement.policy.facts import Facts
from megatron_moevement.policy.log_cover import LogCover
from megatron_moevement.policy.plan import (
    Ending,
    LogSource,
    Origin,
    Plan,
    RollForward,
    SlotSources,
    StageReplay,
    Verdict,
    WindowEdges,
)
from megatron_moevement.policy.rollforward import (
    Progress,
    find_progress,
    newest_committed,
    open_window,
)
from megatron_moevement.policy.schedule import Window
from megatron_moevement.policy.segments import coupled_stages, scope_kind, segments_of, senders_to
from megatron_moevement.policy.slot_choice import choose_sources
from megatron_moevement.policy.slot_gaps import stages_with_gaps


@dataclasses.dataclass(frozen=True)
class Survey:
    """What the facts say about each stage, before any window is chosen.

    Attributes:
        target: T.
        progress: for each stage what its ranks can go on from; None where a state is lost, or is
            of no use because of a gap.
        gaps: stages of which a slot in flight is lost.
    """

    target: int
    progress: tuple[Progress | None, ...]
    gaps: frozenset[int] = frozenset()

    @property
    def behind(self) -> tuple[int, ...]:
        """Stages that are not at the target."""
        return tuple(
            stage
            for stage, progress in enumerate(self.progress)
            if progress is None or progress.step < self.target or progress.window is not None
        )


def plan_recovery(facts: Facts) -> Plan:
    """Decides how a generation gets back to training; every process calls it with equal facts.

    The order of the processes in the facts does not matter: equal facts give equal plans.

    Args:
        facts: what all live processes published.

    Raises:
        InconsistentFactsError: a survivor is behind and can't roll forward.
    """
    facts = of_newest_era(facts)
    target = newest_committed(facts.processes)
    if facts.vacant:
        return _without_spare(facts, target)
    if target is None:
        return _without_memory(facts, "no process knows of a committed step")
    found = _survey(facts, target)
    survey = _without_gaps(facts, found)
    if not survey.behind:
        return _resume(facts, survey)
    windows = _candidates(facts)
    for window in windows:
        plan = _replay(facts, survey, window)
        if plan is not None:
            return plan
    what = "no persisted window is whole" if windows else "no window was persisted yet"
    if not found.behind:
        return _resume_with_new_windows(
            facts, found, f"{_stages(survey.behind)} lost a slot, {what}"
        )
    return _without_memory(facts, f"{_stages(survey.behind)} can't go on and {what}")


def _era(facts: Facts) -> int:
    return max((process.era for process in facts.processes), default=0)


def _epoch(facts: Facts) -> int:
    return max((process.epoch for process in facts.processes), default=0)


def _survey(facts: Facts, target: int) -> Survey:
    """Returns how far each stage got; stages that step together are judged together."""
    progress: dict[int, Progress | None] = {}
    for stage in range(facts.layout.pp):
        coupled = coupled_stages(facts.layout, facts.ends, stage)
        together = _progress_of(facts, stage, coupled, target)
        progress[stage] = together or _progress_of(facts, stage, (stage,), target)
    return Survey(target, tuple(progress.values()))


def _without_gaps(facts: Facts, survey: Survey) -> Survey:
    """Returns the survey without the states that can't complete the window in flight."""
    steps = {stage: each.step for stage, each in enumerate(survey.progress) if each is not None}
    gaps = stages_with_gaps(facts, _persisted(facts), steps)
    progress = (None if stage in gaps else each for stage, each in enumerate(survey.progress))
    return Survey(survey.target, tuple(progress), gaps)


def _progress_of(
    facts: Facts, stage: int, together: tuple[int, ...], target: int
) -> Progress | None:
    """Returns how far a stage got, judged with those that step together with it.

    At a window's last slot one of them may have loaded it while another still waits for it.
    """
    members = [process for other in together for process in facts.stage(other)]
    if len(members) < len(together) * facts.layout.ranks_per_stage:
        return None
    progress = find_progress(members, target)
    if progress is None:
        return None
    window = open_window(facts.stage(stage), progress.step)
    return dataclasses.replace(progress, window=window)


def _candidates(facts: Facts) -> tuple[Window, ...]:
    """Returns the windows that may be replayed from, newest first.

    What any survivor learnt to be persisted at a commit barrier is persisted for the job. A window
    that nobody learnt of is not chosen, even where its slots seem to be there.
    """
    learnt = {process.persisted for process in facts.processes} - {None}
    if not learnt:
        return ()
    newest = max(window for window in learnt if window is not None)
    held = {holding.window for process in facts.processes for holding in process.holdings}
    return tuple(sorted((window for window in held if window <= newest), reverse=True))


def _replay(facts: Facts, survey: Survey, window: Window) -> Plan | None:
    """Returns the plan that replays from a window, None when that is impossible."""
    if survey.target < window.last:
        return None
    cover = LogCover(facts)
    starts = _grow_scope(facts, survey, window, cover)
    scope = {stage for stage, start in starts.items() if start is not None}
    begins = {stage: survey.target if start is None else start for stage, start in starts.items()}
    sparse = {stage: begins[stage] for stage in scope if _is_sparse(survey, stage, begins[stage])}
    slots = _slots(facts, window, sparse)
    ledger_source = _ledger_source(facts, min(begins.values()) + 1, survey.target)
    if slots is None or ledger_source is None:
        return None
    replays = tuple(
        StageReplay(stage, begins[stage], _origin(survey, stage, begins[stage], window))
        for stage in sorted(scope)
    )
    verdict = Verdict.GLOBAL if len(scope) == facts.layout.pp else Verdict.LOCALIZED
    return Plan(
        generation=facts.generation,
        verdict=verdict,
        reason=_reason(facts, survey, scope, window),
        target=survey.target,
        persisted=_persisted(facts),
        window=window,
        roll_forward=_roll_forward(survey, begins),
        replays=replays,
        segments=segments_of(facts.layout, scope),
        scope_kind=scope_kind(facts.layout, facts.ends, scope),
        slots=slots,
        logs=_log_sources(facts, begins),
        ledger_source=ledger_source,
        era=_era(facts),
        epoch=_epoch(facts),
    )


def _grow_scope(
    facts: Facts, survey: Survey, window: Window, cover: LogCover
) -> dict[int, int | None]:
    """Returns for each stage the step it replays from, None for a bystander.

    A stage that is ahead of a neighbour serves its log for the steps in between; one whose log has
    a gap there goes back to the window itself. Stages that must replay the same steps start alike.
    """
    starts: dict[int, int | None] = {}
    for stage, progress in enumerate(survey.progress):
        kept = progress is not None and progress.serves(window)
        starts[stage] = progress.step if kept and progress is not None else window.start
        if stage not in survey.behind:
            starts[stage] = None
    pending = [stage for stage in starts if starts[stage] is not None]
    while pending:
        stage = pending.pop()
        start = starts[stage]
        assert start is not None
        joining = []
        at = {other: survey.target if step is None else step for other, step in starts.items()}
        for other in coupled_stages(facts.layout, facts.ends, stage):
            if at[other] != start:
                joining += [stage, other]
        for direction, sender in senders_to(facts.layout, stage):
            if not cover.covers(sender, direction, start + 1, at[sender]):
                joining.append(sender)
        for other in joining:
            if starts[other] != window.start:
                starts[other] = window.start
                pending.append(other)
    return starts


def _slots(facts: Facts, window: Window, begins: dict[int, int]) -> tuple[SlotSources, ...] | None:
    """Returns who sends which slots; None when a slot is nowhere."""
    wanted = {
        rank: begin - window.start
        for stage, begin in begins.items()
        for rank in facts.layout.stage_ranks(stage)
    }
    return choose_sources(facts.processes, window, wanted)


def _ledger_source(facts: Facts, first: int, last: int) -> int | None:
    """Returns a process that has the ledger entries of the steps [first, last]."""
    for process in facts.processes:
        if last < first or (first in process.ledger and last in process.ledger):
            return process.process
    return None


def _is_sparse(survey: Survey, stage: int, start: int) -> bool:
    """Returns whether a stage in scope still has slots to load when it starts."""
    progress = survey.progress[stage]
    return progress is None or progress.step != start or progress.window is not None


def _origin(survey: Survey, stage: int, start: int, window: Window) -> Origin:
    progress = survey.progress[stage]
    kept = progress is not None and progress.step == start and progress.serves(window)
    return Origin.KEPT if kept else Origin.WINDOW


def _roll_forward(survey: Survey, begins: dict[int, int]) -> tuple[RollForward, ...]:
    """Returns who rolls forward: the laggards of the stages that go on from where they are."""
    rolling = {
        roll
        for stage, progress in enumerate(survey.progress)
        if progress is not None and progress.step == begins[stage]
        for roll in progress.roll_forward
        if roll.rank.pp == stage
    }
    return tuple(sorted(rolling, key=lambda roll: roll.rank))


def _log_sources(facts: Facts, begins: dict[int, int]) -> tuple[LogSource, ...]:
    sources = []
    for stage, start in sorted(begins.items()):
        for direction, sender in senders_to(facts.layout, stage):
            if begins[sender] > start:
                source = LogSource(stage, sender, direction, start + 1, begins[sender])
                sources.append(source)
    return tuple(sources)


def _persisted(facts: Facts) -> Window | None:
    learnt = [process.persisted for process in facts.processes if process.persisted is not None]
    return max(learnt, default=None)


def _resume(facts: Facts, survey: Survey) -> Plan:
    begins = dict.fromkeys(range(facts.layout.pp), survey.target)
    rolling = _roll_forward(survey, begins)
    forward = f", {len(rolling)} ranks roll forward to it" if rolling else ""
    return Plan(
        generation=facts.generation,
        verdict=Verdict.RESUME,
        reason=f"all ranks hold step {survey.target}{forward}",
        target=survey.target,
        persisted=_persisted(facts),
        roll_forward=rolling,
        ledger_source=_ledger_source(facts, survey.target, survey.target),
        era=_era(facts),
        epoch=_epoch(facts),
    )


def _resume_with_new_windows(facts: Facts, survey: Survey, why: str) -> Plan:
    """Goes on without anything to replay from: the states stand, and the job is lost without them.

    What the stores hold never becomes a whole window. It is dropped, and a first window begins.
    """
    return dataclasses.replace(
        _resume(facts, survey),
        reason=f"all ranks hold step {survey.target}; {why}: windows begin anew",
        persisted=None,
        edges=WindowEdges.ANEW,
        epoch=_epoch(facts) + 1,
    )


def _without_spare(facts: Facts, target: int | None) -> Plan:
    """Ends the job, with everything that is left written for the next launch.

    Others may have ended and written before; whether it is enough is for that launch to find out.

    Args:
        facts: what all live processes published.
        target: T; None when only spares are left that know of no committed step.
    """
    missing = ", ".join(map(str, facts.vacant[:3])) + (" ..." if len(facts.vacant) > 3 else "")
    plan = _abort(facts, f"no spare for {missing}, and there is nothing to write")
    if not any(process.holdings for process in facts.processes):
        return plan
    for window in _candidates(facts) if target is not None else ():
        slots = _slots(facts, window, dict.fromkeys(range(facts.layout.pp), window.start))
        source = _ledger_source(facts, window.start + 1, plan.target)
        if slots is not None and source is not None:
            return dataclasses.replace(
                plan,
                reason=f"no spare for {missing}: the next launch replays from {window.start}",
                persisted=_persisted(facts),
                window=window,
                slots=slots,
                ledger_source=source,
                ending=Ending.FLUSH,
            )
    reason = f"no spare for {missing}: what is left is written, no window is whole in it"
    return dataclasses.replace(plan, reason=reason, ending=Ending.FLUSH)


def _without_memory(facts: Facts, why: str) -> Plan:
    """Falls back to durable storage, or gives up."""
    if facts.durable is None:
        return _abort(facts, f"{why}, and there is no durable checkpoint")
    return Plan(
        generation=facts.generation,
        verdict=Verdict.ROLLBACK,
        reason=f"{why}: back to the durable checkpoint of step {facts.durable}",
        target=facts.durable,
        edges=WindowEdges.ANEW,
        era=_era(facts) + 1,
        epoch=_epoch(facts) + 1,
    )


def _abort(facts: Facts, reason: str) -> Plan:
    return Plan(
        generation=facts.generation,
        verdict=Verdict.ABORT,
        reason=reason,
        target=newest_committed(facts.processes) or 0,
        ending=Ending.FAILURE,
        era=_era(facts),
        epoch=_epoch(facts),
    )


def _stages(stages: tuple[int, ...]) -> str:
    return ("stage " if len(stages) == 1 else "stages ") + ", ".join(map(str, stages))


def _reason(facts: Facts, survey: Survey, scope: set[int], window: Window) -> str:
    without = [stage for stage in survey.behind if survey.progress[stage] is None]
    lost = [stage for stage in without if stage not in survey.gaps]
    grown = sorted(scope.difference(survey.behind))
    parts = []
    if lost:
        parts.append(f"{_stages(tuple(lost))} lost state")
    if survey.gaps:
        parts.append(f"{_stages(tuple(sorted(survey.gaps)))} must capture a lost slot again")
    unfinished = tuple(stage for stage in survey.behind if stage not in without)
    if unfinished:
        parts.append(f"{_stages(unfinished)} had not finished replaying")
    if grown:
        parts.append(f"{_stages(tuple(grown))} joined: log incomplete, or tied")
    if facts.layout.pp == 1:
        parts.append("one stage only, so nothing is local")
    return f"{'; '.join(parts)}; from the window of step {window.start}"
