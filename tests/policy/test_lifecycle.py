"""Lifecycle: which events can happen in which phase, and what a plan means for a process."""

import itertools

import pytest

from megatron_moevement.policy.lifecycle import (
    Event,
    IllegalEventError,
    Lifecycle,
    Phase,
    advance,
    event_of,
)
from megatron_moevement.policy.plan import Verdict
from megatron_moevement.policy.ranks import Layout, LogicalRank
from megatron_moevement.policy.recovery import plan_recovery
from tests.harness.job_facts import Job, with_replicas, without_processes


def walk(*events, state=None):
    """Returns where a process is after events; each interrupt begins the next generation."""
    state = state or Lifecycle()
    for event in events:
        generation = state.generation + 1 if event is Event.INTERRUPTED else None
        state = advance(state, event, generation)
    return state


def all_moves():
    """Returns for each phase and event the next phase, where the event can happen."""
    moves = {}
    for phase, event in itertools.product(Phase, Event):
        try:
            moves[phase, event] = walk(event, state=Lifecycle(phase, 3)).phase
        except IllegalEventError:
            continue
    return moves


MOVES = all_moves()


@pytest.mark.parametrize(
    ("events", "phase"),
    [
        ([Event.STARTED], Phase.TRAINING),
        ([Event.STARTED_SPARE], Phase.STANDBY),
        ([Event.STARTED, Event.FINISHED], Phase.ENDED),
        ([Event.STARTED, Event.INTERRUPTED, Event.AGREED], Phase.SETTLING),
    ],
)
def test_a_process_starts_trains_and_is_interrupted(events, phase):
    assert walk(*events).phase is phase


RECOVERIES = {
    "resume": [Event.STANDS, Event.PROTECTED],
    "bystander": [Event.SERVES, Event.SERVED, Event.PROTECTED],
    "replay": [Event.REPLAYS, Event.FETCHED, Event.REPLAYED, Event.PROTECTED],
    "rollback": [Event.LOADS, Event.LOADED, Event.PROTECTED],
}


@pytest.mark.parametrize("events", RECOVERIES.values(), ids=RECOVERIES)
def test_every_recovery_leads_back_to_training_through_protection(events):
    settled = walk(Event.STARTED, Event.INTERRUPTED, Event.AGREED)
    assert walk(*events[:-1], state=settled).phase is Phase.PROTECTING
    assert walk(*events, state=settled) == Lifecycle(Phase.TRAINING, 1)


def test_a_spare_that_is_not_needed_goes_back_to_standby():
    state = walk(Event.STARTED_SPARE, Event.INTERRUPTED, Event.AGREED, Event.SERVES, Event.SERVED)
    assert walk(Event.PROTECTED_SPARE, state=state).phase is Phase.STANDBY


def test_a_job_ends_with_its_state_written_or_without():
    settled = walk(Event.STARTED, Event.INTERRUPTED, Event.AGREED)
    assert walk(Event.FLUSHES, state=settled).phase is Phase.FLUSHING
    assert walk(Event.FLUSHES, Event.FLUSHED, state=settled).phase is Phase.ENDED
    assert walk(Event.GIVES_UP, state=settled).phase is Phase.ENDED


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.ENDED])
def test_an_interrupt_leads_from_every_living_phase_to_new_facts(phase):
    state = advance(Lifecycle(phase, 4), Event.INTERRUPTED, 6)
    assert state == Lifecycle(Phase.GATHERING, 6)


def test_nothing_happens_to_a_process_that_has_ended():
    assert not [event for phase, event in MOVES if phase is Phase.ENDED]


def test_no_phase_is_a_dead_end_and_every_phase_is_reached():
    reached, edge = {Phase.STARTING}, {Phase.STARTING}
    while edge:
        edge = {after for (phase, _), after in MOVES.items() if phase in edge} - reached
        reached |= edge
    assert reached == set(Phase)
    leaving = {phase for (phase, _), after in MOVES.items() if after is not phase}
    assert leaving == set(Phase) - {Phase.ENDED}


def test_nobody_trains_before_the_slots_in_danger_are_copied():
    into = {phase for (phase, _), after in MOVES.items() if after is Phase.TRAINING}
    assert into == {Phase.STARTING, Phase.PROTECTING}


def test_nobody_settles_without_a_plan_that_all_agree_on():
    into = {pair for pair, after in MOVES.items() if after is Phase.SETTLING}
    assert into == {(Phase.GATHERING, Event.AGREED)}


@pytest.mark.parametrize(
    ("phase", "event"), [pair for pair in itertools.product(Phase, Event) if pair not in MOVES]
)
def test_what_can_not_happen_is_refused_by_name(phase, event):
    generation = 9 if event is Event.INTERRUPTED else None
    with pytest.raises(IllegalEventError, match=f"{event.name}.*{phase.name}"):
        advance(Lifecycle(phase, 3), event, generation)


@pytest.mark.parametrize("generation", [None, 2, 3])
def test_an_interrupt_begins_a_later_generation(generation):
    with pytest.raises(IllegalEventError, match="generation"):
        advance(Lifecycle(Phase.TRAINING, 3), Event.INTERRUPTED, generation)


def test_only_an_interrupt_begins_a_generation():
    with pytest.raises(IllegalEventError, match="generation"):
        advance(Lifecycle(Phase.GATHERING, 3), Event.AGREED, 4)


LAYOUT = Layout(pp=2)


def plan_after(lost, **job):
    facts = Job(LAYOUT, **{"step": 9, **job}).facts()
    return plan_recovery(without_processes(facts, lost))


def test_a_plan_means_one_event_for_each_process():
    replaying, waiting = LogicalRank(0), LogicalRank(1)
    localized = plan_after({0})
    assert localized.verdict is Verdict.LOCALIZED
    assert event_of(localized, replaying) is Event.REPLAYS
    assert event_of(localized, waiting) is Event.SERVES
    assert event_of(localized, None) is Event.SERVES
    for plan, event in (
        (plan_after(set()), Event.STANDS),
        (plan_after({0}, step=1, durable=1), Event.LOADS),
        (plan_after({0}, spares=0), Event.FLUSHES),
        (plan_after({0}, step=1), Event.GIVES_UP),
    ):
        assert {event_of(plan, rank) for rank in (replaying, waiting, None)} == {event}


def test_every_event_that_a_plan_means_can_happen_to_a_settled_process():
    plans = [plan_after(set()), plan_after({0}), plan_after({0}, step=1, durable=1)]
    plans += [plan_after({0}, spares=0), plan_after({0}, step=1)]
    replicated = Job(Layout(pp=2, dp=2), step=9)
    plans += [plan_recovery(with_replicas(without_processes(replicated.facts(), {1})))]
    assert {plan.verdict for plan in plans} == set(Verdict) - {Verdict.GLOBAL}
    for plan in plans:
        for rank in (*LAYOUT.ranks, None):
            assert (Phase.SETTLING, event_of(plan, rank)) in MOVES
