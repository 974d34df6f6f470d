# SPDX-License-Identifier: Apache-2.0
"""What the oracle demands of recoveries: their plans, what they lose, and what they do again."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_moevement.policy.facts.facts import Condition
from megatron_moevement.policy.recovery.plan import Plan, Verdict
from megatron_moevement.runtime.observation.events import EventName, EventRecord
from tests.harness.explorer.outcome import Outcome
from tests.harness.explorer.scenario import Scenario
from tests.harness.explorer.timeline import Recovery, Timeline

_KEEPS_NOTHING = "keeps no state of the job"


def check_plans(scenario: Scenario, outcome: Outcome, timeline: Timeline) -> Iterator[str]:
    """Checks that each plan is the one that the policy makes of the facts that were written."""
    del scenario, outcome
    for recovery in timeline.recoveries:
        if recovery.broken:
            yield f"{recovery.name}: the facts have no plan: {recovery.broken}"
            continue
        events = _of(timeline, recovery, EventName.PLAN)
        # A generation may build its objects anew in order to carry out what it has planned.
        any_events = timeline.of(recovery.launch, EventName.PLAN, recovery.facts.generation)
        if recovery.plan is not None and not any_events and timeline.has_come_back(recovery):
            yield f"{recovery.name}: no {recovery.plan.verdict.value} was planned"
        for event in events:
            if recovery.plan is None:
                yield f"{recovery.name}: {event.fields['verdict']} where nothing is in memory"
            elif event.fields["digest"] != recovery.plan.digest:
                yield (
                    f"{recovery.name}: rank {event.logical_rank} planned "
                    f"{event.fields['verdict']} to {event.fields['target']}, its facts say "
                    f"{recovery.plan.verdict.value} to {recovery.plan.target}"
                )


def check_targets(scenario: Scenario, outcome: Outcome, timeline: Timeline) -> Iterator[str]:
    """Checks that each recovery wrote its facts, and that training went on where it led to."""
    del scenario, outcome
    known = {(recovery.launch, recovery.facts.generation) for recovery in timeline.recoveries}
    for launch in range(len(timeline.launches)):
        names = (EventName.PLAN, EventName.RECOVERED)
        found = {event.generation for name in names for event in timeline.of(launch, name)}
        for generation in sorted(found):
            if (launch, generation) not in known:
                yield f"launch {launch}, generation {generation}: it recovered, without its facts"
    for recovery in timeline.recoveries:
        trained = [event.iteration for event in _of(timeline, recovery, EventName.ITERATION)]
        if min(trained, default=recovery.target + 1) != recovery.target + 1:
            yield f"{recovery.name}: it led to {recovery.target}, training began at {min(trained)}"


def check_copies(scenario: Scenario, outcome: Outcome, timeline: Timeline) -> Iterator[str]:
    """Checks that no window is persisted without copies where a failure domain could keep them."""
    del outcome
    for launch in range(len(timeline.launches)) if scenario.job.copies else ():
        for event in timeline.of(launch, EventName.WINDOW_PERSISTED):
            if not event.fields["copies"]:
                yield f"launch {launch}: the window of step {event.fields['start']} has no copies"
                return


def check_lost_work(scenario: Scenario, outcome: Outcome, timeline: Timeline) -> Iterator[str]:
    """Checks that no step is lost, or done again from further back than promised.

    That holds where memory is lost in no more failure domains than copies were made, since the
    newest persisted window was captured, or the job began. Ranks alone have room for as many as the
    job is drawn with; spares make more, and the job says how many there are. What is lost otherwise
    has to be said, with the number of steps.
    """
    for recovery in timeline.recoveries:
        lost = recovery.newest - recovery.target
        persisted = timeline.persisted_before(recovery.time)
        gone = timeline.memories_lost(recovery, 0.0 if persisted is None else persisted.captured)
        copies = max(scenario.job.copies, 0 if persisted is None else persisted.copies)
        if gone <= copies:
            if lost > (
                _at_the_edge(recovery)
                if gone <= scenario.job.copies
                else _unheard(scenario, recovery)
            ):
                yield (
                    f"{recovery.name}: {lost} committed steps are lost ({recovery.newest} to "
                    f"{recovery.target}) with the memory of {gone} domains, there were "
                    f"{copies} copies of each slot: {_reason(recovery.plan)}"
                )
            yield from _further_back(recovery)
        elif lost > 1 and recovery.plan is None and not _was_said(outcome, timeline, recovery):
            yield f"{recovery.name}: {lost} committed steps are lost and nobody says so"
        yield from _not_said(outcome, timeline, recovery)


def _was_said(outcome: Outcome, timeline: Timeline, recovery: Recovery) -> bool:
    """Returns whether all that outlived the launch before said that they keep nothing.

    A launch that finds nothing in memory can't know that there was anything.
    """
    former = recovery.launch - 1
    if former < 0 or recovery.facts.generation:
        return False
    launch = outcome.launches[former]
    dead = {death.process for death in timeline.deaths if death.launch == former}
    lived = set(range(len(launch.pids))) - dead
    return all(_KEEPS_NOTHING in launch.output(process) for process in lived)


def _not_said(outcome: Outcome, timeline: Timeline, recovery: Recovery) -> Iterator[str]:
    """Checks that the line of a rollback is printed, and has the number of steps that are lost.

    A step may have been committed and not reported yet; one that only the dead had may be unknown.
    """
    plan, lost, said = recovery.plan, recovery.newest - recovery.target, recovery.said
    if plan is None or plan.verdict is not Verdict.ROLLBACK or not timeline.has_come_back(recovery):
        return
    if said is not None and not lost - _at_the_edge(recovery) <= said <= lost + 1:
        yield f"{recovery.name}: {lost} committed steps are lost and {said} are said to be"
    # Once per generation, also where that builds its objects anew and finds more to be lost.
    lines = [
        f"{one.plan.verdict.value}: {one.plan.reason}"
        for one in timeline.recoveries
        if one.plan is not None and one.name == recovery.name
    ]
    launch = outcome.launches[recovery.launch]
    printed = [launch.output(process) for process in range(len(launch.pids))]
    if not any(line in output for line in lines for output in printed):
        yield f"{recovery.name}: nobody says {lines[-1]!r}"


def _at_the_edge(recovery: Recovery) -> int:
    """Returns how many steps may be lost that only those had committed who are dead: one.

    Where anybody lives who is a step behind, what the dead one left says nothing: its gradients of
    that step are given up.
    """
    processes = recovery.facts.processes
    alive = [one for one in processes if one.live.condition is not Condition.ABSENT]
    committed = [one.committed for one in alive or processes if one.committed is not None]
    return 1 if max(committed, default=0) < recovery.newest else 0


def _unheard(scenario: Scenario, recovery: Recovery) -> int:
    """Returns how many steps may be lost where spares may be all that is left.

    They hear of a step with a slot, and slots wait to be sent for as long as the ring has room.
    """
    if all(process.is_new for process in recovery.facts.processes):
        return scenario.job.protected_from
    return _at_the_edge(recovery)


def _further_back(recovery: Recovery) -> Iterator[str]:
    """Checks that a replay begins with the newest window that anybody knows to be persisted.

    What is durable counts as much, from the state that the job began with on.
    """
    plan = recovery.plan
    if plan is None or not (plan.is_from_durable or plan.window):
        return
    known = [one.persisted for one in recovery.facts.processes if one.persisted is not None]
    newest = max((window.start for window in known), default=0)
    begin = plan.loaded if plan.window is None else plan.window.start
    if begin is not None and begin < newest:
        yield (
            f"{recovery.name}: the replay begins with step {begin}, the window of step {newest} "
            "was persisted"
        )


def _reason(plan: Plan | None) -> str:
    return "no plan" if plan is None else f"{plan.verdict.value}: {plan.reason}"


def check_replays(scenario: Scenario, outcome: Outcome, timeline: Timeline) -> Iterator[str]:
    """Checks that each stage replays what its plan says, once, and others nothing."""
    del scenario, outcome
    for recovery in timeline.recoveries:
        plan = recovery.plan
        if plan is None:
            continue
        replays = _of(timeline, recovery, EventName.REPLAY)
        for event in replays:
            if not event.fields["replay_verified"]:
                yield f"{recovery.name}: step {event.iteration} sent other bits: {event.fields}"
        for rank, place in enumerate(recovery.facts.layout.ranks):
            steps = [event.iteration for event in replays if event.logical_rank == rank]
            start = plan.start(place.pp)
            if steps != list(range(start + 1, start + 1 + len(steps))):
                yield f"{recovery.name}: rank {rank} replayed {steps}, to begin after {start}"
            elif steps and steps[-1] > plan.target:
                yield f"{recovery.name}: rank {rank} replayed {steps} beyond {plan.target}"
        yield from _check_recovered(timeline, recovery, plan)


def _check_recovered(timeline: Timeline, recovery: Recovery, plan: Plan) -> Iterator[str]:
    if plan.verdict is Verdict.ROLLBACK:
        return
    ranks = recovery.facts.layout.ranks
    for event in _of(timeline, recovery, EventName.RECOVERED):
        stage = ranks[event.logical_rank].pp
        steps, passes = event.fields["replayed_steps"], event.fields["forward_passes"]
        if steps != plan.target - plan.start(stage):
            yield f"{recovery.name}: rank {event.logical_rank} says that it replayed {steps} steps"
        if not steps and (passes or event.fields["backward_passes"]):
            yield f"{recovery.name}: rank {event.logical_rank} stood by and made {passes} passes"


def _of(timeline: Timeline, recovery: Recovery, name: EventName) -> list[EventRecord]:
    """Returns the events of a recovery."""
    return [
        event
        for event in timeline.of(recovery.launch, name, recovery.facts.generation)
        if recovery.time <= event.time < recovery.until
    ]
