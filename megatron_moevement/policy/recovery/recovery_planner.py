# SPDX-License-Identifier: Apache-2.0
"""Recovery: from the facts of a generation to the plan that all its processes carry out.

Source: sections 3.2 (sparse-to-dense conversion) and 3.3 (upstream logging), and the appendix on
concurrent failures. Three things go further than there: a stage that an earlier, interrupted
recovery brought part of the way goes on from there, a neighbour whose log does not reach back
joins, and a lost state of which replicas survive is copied (`policy/recovery/replica_copy.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import chain

from megatron_moevement.policy.facts.facts import Facts
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.job.segments import (
    coupled_stages,
    scope_kind,
    segments_of,
    senders_to,
)
from megatron_moevement.policy.recovery.histories import of_newest_history
from megatron_moevement.policy.recovery.newest_state import is_memory_newest
from megatron_moevement.policy.recovery.plan import (
    Origin,
    Plan,
    RollForward,
    Schedules,
    StageReplay,
    Verdict,
    WindowEdges,
)
from megatron_moevement.policy.recovery.reasons import (
    done_again,
    replay_reason,
    resume_reason,
    stage_names,
)
from megatron_moevement.policy.recovery.rollforward import (
    agreed_timetable,
    check_nobody_is_ahead,
    newest_committed,
)
from megatron_moevement.policy.recovery.slot_choice import Wanted, choose_fetches, slots_to_load
from megatron_moevement.policy.recovery.sources import candidates, find_ledger, log_sources
from megatron_moevement.policy.recovery.stage_status import (
    Survey,
    persisted_of,
    survey_of,
    without_gaps,
)
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.policy.window.timetable import Timetable


def plan_recovery(facts: Facts) -> Plan:
    """Decides how a generation gets back to training; every process calls it with equal facts.

    The order of the processes in the facts does not matter: equal facts give equal plans.

    Raises:
        InconsistentFactsError: a survivor is behind and can't roll forward, or ahead of all that
            was written down; or a rank has no process.
    """
    facts = of_newest_history(facts)
    facts.check_ranks()
    target = newest_committed(facts.processes)
    if target is None:
        return plan_from_durable(facts, "no process has a committed step")
    check_nobody_is_ahead(facts.processes, target)
    found = survey_of(facts, target)
    survey = without_gaps(facts, found)
    if not survey.behind:
        return _resume(facts, survey)
    windows = candidates(facts)
    for window in windows:
        plan = _replay(facts, survey, window)
        if plan is not None:
            return plan
    what = "no persisted window is whole" if windows else "no window was persisted yet"
    if not found.behind:
        return _resume_with_new_windows(
            facts, found, f"{stage_names(survey.behind)} lost a slot, {what}"
        )
    return plan_from_durable(facts, f"{stage_names(survey.behind)} can't go on and {what}")


def _rollbacks(facts: Facts) -> int:
    return max((process.rollbacks for process in facts.processes), default=0)


def _schedules(facts: Facts, restarted_at: int | None = None) -> Schedules:
    """Returns which schedules all go on with, and who has them.

    Args:
        restarted_at: the step with which windows begin anew; None where they go on.
    """
    timetable = agreed_timetable(facts.processes)
    if timetable is not None and restarted_at is not None:
        timetable = timetable.restarted(restarted_at)
    wanted = frozenset[str]() if timetable is None else timetable.digests()
    having = (
        process.process
        for process in chain(facts.by_rank.values(), facts.processes)
        if process.timetable is not None and process.timetable.digests() >= wanted
    )
    return Schedules(timetable, next(having, None))


def _holders(facts: Facts) -> Mapping[LogicalRank, tuple[int, ...]]:
    return {rank: facts.by_rank[rank].holders for rank in sorted(facts.by_rank)}


def _replay(facts: Facts, survey: Survey, window: Window) -> Plan | None:
    """Returns the plan that replays from a window, None when that is impossible."""
    schedules = _schedules(facts)
    timetable = schedules.timetable
    if survey.target < window.last or timetable is None or not timetable.has(window):
        return None
    grow = _go_back if _fills_rings(facts, survey, window, timetable) else _grow_scope
    starts = grow(facts, survey, window)
    scope = {stage for stage, start in starts.items() if start is not None}
    begins = {stage: survey.target if start is None else start for stage, start in starts.items()}
    sparse = {stage: begins[stage] for stage in scope if _is_sparse(survey, stage, begins[stage])}
    rolling = _roll_forward(survey, begins)
    first = min([*(begin + 1 for begin in begins.values()), *(roll.step for roll in rolling)])
    ledger_source = find_ledger(facts, first, survey.target)
    replays = tuple(
        StageReplay(
            *(stage, begins[stage], _origin(survey, stage, begins[stage], window)),
            converts=stage in sparse,
        )
        for stage in sorted(scope)
    )
    rewound = {replay.stage for replay in replays if replay.origin is Origin.WINDOW}
    going_on = {stage: begin for stage, begin in begins.items() if stage not in rewound}
    copies = survey.copies(scope)
    stand_ins = survey.found.stand_ins_of(copies)
    wanted = Wanted(going_on, window, slots_to_load(window, sparse), stand_ins)
    if ledger_source is None or not wanted.can_load(facts):
        return None
    verdict = Verdict.GLOBAL if len(scope) == facts.layout.pp else Verdict.LOCALIZED
    return Plan(
        generation=facts.generation,
        verdict=verdict,
        reason=replay_reason(facts, survey, scope, window),
        target=survey.target,
        persisted=persisted_of(facts),
        window=window,
        roll_forward=rolling,
        replays=replays,
        segments=segments_of(facts.layout, scope),
        scope_kind=scope_kind(facts.layout, facts.ends, scope),
        fetches=choose_fetches(facts, wanted),
        holders=_holders(facts),
        logs=log_sources(facts, begins),
        copies=copies,
        ledger_source=ledger_source,
        rollbacks=_rollbacks(facts),
        schedules=schedules,
    )


def _fills_rings(facts: Facts, survey: Survey, window: Window, timetable: Timetable) -> bool:
    """Returns whether rings may be full of slots from a window on before training goes on.

    A newer one must be persisted by then. Only all ranks agree on that, at the same step; each
    waits for it where its ring is full, so all rings must be equally full.
    """
    persisted = persisted_of(facts)
    is_older = persisted is not None and window < persisted
    return is_older or survey.target > timetable.last_before_persisted(window) + 1


def _go_back(facts: Facts, _: Survey, window: Window) -> dict[int, int | None]:
    """Lets all stages replay from a window."""
    return dict.fromkeys(range(facts.layout.pp), window.start)


def _grow_scope(facts: Facts, survey: Survey, window: Window) -> dict[int, int | None]:
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
            if not facts.logged[sender, direction].issuperset(range(start + 1, at[sender] + 1)):
                joining.append(sender)
        for other in joining:
            if starts[other] != window.start:
                starts[other] = window.start
                pending.append(other)
    return starts


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


def _resume(facts: Facts, survey: Survey) -> Plan:
    begins = dict.fromkeys(range(facts.layout.pp), survey.target)
    rolling, copies, persisted = _roll_forward(survey, begins), survey.copies(), persisted_of(facts)
    source = find_ledger(facts, survey.target, survey.target)
    if copies and persisted is not None:  # who comes in new takes over what others have
        whole = find_ledger(facts, persisted.start + 1, survey.target)
        source = source if whole is None else whole
    wanted = Wanted(begins, stand_ins=survey.found.stand_ins_of(copies))
    return Plan(
        generation=facts.generation,
        verdict=Verdict.COPIED if copies else Verdict.RESUME,
        reason=resume_reason(survey, len(rolling)),
        target=survey.target,
        persisted=persisted,
        roll_forward=rolling,
        fetches=choose_fetches(facts, wanted),
        holders=_holders(facts),
        copies=copies,
        ledger_source=source,
        rollbacks=_rollbacks(facts),
        schedules=_schedules(facts),
    )


def _resume_with_new_windows(facts: Facts, survey: Survey, why: str) -> Plan:
    """Goes on without anything to replay from: the states stand, and the job is lost without them.

    What the stores hold never becomes a whole window. It is dropped, and a first window begins.
    """
    plan = _resume(facts, survey)
    return dataclasses.replace(
        plan,
        fetches=(),
        reason=f"{resume_reason(survey, 0)}; {why}: the window schedule restarts",
        persisted=None,
        edges=WindowEdges.RESTARTED,
        schedules=_schedules(facts, plan.target),
    )


def plan_start(facts: Facts) -> Plan | None:
    """Returns the plan of any start of a job; None: a launch loads what is durable, or begins.

    Raises:
        InconsistentFactsError: a survivor is behind and can't roll forward.
    """
    facts = of_newest_history(facts)
    if is_memory_newest(facts):
        return plan_recovery(facts)
    if facts.generation == 0:
        return None
    if newest_committed(facts.processes) is None:
        return plan_from_durable(facts, "nothing is left in memory")
    return plan_from_durable(facts, "what is left in memory is not newer than what was saved")


def has_no_use_of_memory(plan: Plan | None) -> bool:
    """Returns whether a job would go back unless more is found than its processes hold.

    Args:
        plan: what `plan_start` returned for what they hold.
    """
    if plan is None or plan.edges is WindowEdges.RESTARTED or plan.is_from_durable:
        return True
    return plan.verdict is Verdict.ROLLBACK


def plan_from_durable(facts: Facts, why: str) -> Plan:
    """Returns the plan of a job that has no window to replay from.

    What is durable is a state of all operators, so it is replayed from like a window as long as
    somebody has the ledger of all steps since: no committed step is lost then.

    Args:
        facts: what all live processes published, of the newest era; a checkpoint that turned out
            not to be usable is not the durable one.
        why: there is no window.
    """
    committed = newest_committed(facts.processes)
    if committed is not None and committed > facts.durable:
        source = find_ledger(facts, facts.durable + 1, committed)
        if source is not None:
            return _replay_from_durable(facts, facts.durable, committed, source, why)
    lost = None if committed is None else max(committed - facts.durable, 0)
    back = f"back to the durable checkpoint of step {facts.durable}"
    return Plan(
        generation=facts.generation,
        verdict=Verdict.ROLLBACK,
        reason=f"{why}: {back}, {done_again(facts.durable, lost)}",
        target=facts.durable,
        lost_steps=lost,
        edges=WindowEdges.RESTARTED,
        rollbacks=_rollbacks(facts) + 1,
        schedules=_schedules(facts, facts.durable),
    )


def _replay_from_durable(facts: Facts, durable: int, target: int, source: int, why: str) -> Plan:
    """Returns the plan of a job of which all stages replay from what is durable.

    Where that is the state that its first window begins with, this window is captured again.
    """
    starts = {held.window.start for process in facts.processes for held in process.holdings}
    timetable = agreed_timetable(facts.processes)
    is_first = (
        persisted_of(facts) is None
        and min(starts, default=durable) == durable
        and (timetable is None or timetable.first_step == durable)
    )
    scope = set(range(facts.layout.pp))
    state = f"the durable checkpoint of step {durable}" if durable else "the initial state"
    begins = dict.fromkeys(scope, durable) if is_first else {}
    return Plan(
        generation=facts.generation,
        verdict=Verdict.GLOBAL,
        reason=f"{why}: all replay from {state}",
        target=target,
        replays=tuple(StageReplay(stage, durable, Origin.DURABLE) for stage in sorted(scope)),
        segments=segments_of(facts.layout, scope),
        scope_kind=scope_kind(facts.layout, facts.ends, scope),
        fetches=choose_fetches(facts, Wanted(begins)),
        holders=_holders(facts),
        ledger_source=source,
        rollbacks=_rollbacks(facts),
        schedules=_schedules(facts, None if is_first else durable),
        edges=WindowEdges.KEPT if is_first else WindowEdges.RESTARTED,
    )
