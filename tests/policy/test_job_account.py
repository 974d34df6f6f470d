# SPDX-License-Identifier: Apache-2.0
"""The parts of each process add up to the time of the job, whatever its processes recorded."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.accounting.account import account_of
from megatron_moevement.policy.accounting.event import EventName, EventRecord
from megatron_moevement.policy.accounting.parts import Part
from megatron_moevement.policy.recovery.lifecycle import Phase
from tests.harness.job_events import (
    ended,
    event,
    launched,
    read,
    restarted,
    seconds,
    training,
)

SECONDS = st.floats(0, 100).map(lambda value: round(value, 3))


@st.composite
def records(draw):
    """Draws any event with fields that it may have, which need not make sense together."""
    name = draw(st.sampled_from(EventName))
    at = 1000 + draw(SECONDS)
    fields = {
        EventName.PHASE: {"phase": draw(st.sampled_from(Phase)).value},
        EventName.FAULT_DETECTED: {
            "noticed_s": at - draw(SECONDS),
            "last_step_s": draw(st.none() | SECONDS.map(lambda value: at - value)),
            "teardown_s": draw(SECONDS),
            "rendezvous_s": draw(SECONDS),
        },
        EventName.RECOVERED: {
            "duration_s": draw(SECONDS),
            "breakdown_s": draw(
                st.dictionaries(st.sampled_from(["plan", "replay", "wait"]), SECONDS)
            ),
        },
        EventName.PROCESS_START: draw(
            st.sampled_from([{}, {"entered_s": at - 2, "joined_s": at - 1}])
        ),
    }.get(name, draw(st.sampled_from([{}, {"duration_s": draw(SECONDS), "stall_s": 0.5}])))
    place = (draw(st.integers(-1, 3)), 1, draw(st.integers(0, 3)), draw(st.integers(0, 9)))
    return EventRecord(at, *place, name, fields)


HISTORIES = st.lists(st.lists(records(), max_size=12), max_size=5)


@given(HISTORIES)
def test_any_histories_add_up_by_process_exactly(histories):
    account = account_of(read(histories))
    if not any(histories):
        assert account is None
        return
    for process in account.processes:
        assert sum(process.parts_us.values()) == account.wall_us
    assert sum(account.parts_us.values()) == account.wall_us * len(account.processes)
    for index, outage in enumerate(account.outages):
        for process in account.processes:
            took = sum(process.outages_us[index].values())
            assert outage.end_us is None or took <= max(0, outage.end_us - outage.start_us)


@given(HISTORIES, st.integers(0, 12))
def test_torn_histories_add_up_too(histories, kept):
    account = account_of(read([one[:kept] for one in histories]))
    assert account is None or all(
        sum(process.parts_us.values()) == account.wall_us for process in account.processes
    )


def test_a_launch_that_nothing_struck_has_start_up_steps_and_an_end():
    history = [
        event(0, EventName.PROCESS_START),
        *training(5, 10),
        event(15, EventName.PHASE, phase=Phase.ENDING.value),
        event(18, EventName.CHECKPOINT_SAVED, duration_s=2.0),
    ]
    account = account_of(read([history]))
    assert seconds(account.processes[0]) == pytest.approx(
        {
            Part.START_UP: 5,
            Part.USEFUL: 8,
            Part.STALL: 1,
            Part.BETWEEN: 1,
            Part.SAVE: 2,
            Part.ENDING: 1,
        }
    )
    assert (account.steps, account.ranks, account.faults) == (10, 1, 0)
    assert account.effective_training_time_ratio == pytest.approx(8 / 18)


def test_of_a_checkpoint_that_is_written_beside_training_its_waits_are_the_save():
    history = [
        event(0, EventName.PROCESS_START),
        *training(5, 10),
        event(16, EventName.CHECKPOINT_BEGUN, duration_s=0.5),
        event(17, EventName.CHECKPOINT_SAVED, duration_s=0.25, written_s=1.0),
        event(18, EventName.PHASE, phase=Phase.ENDING.value),
    ]
    parts = seconds(account_of(read([history])).processes[0])
    assert parts[Part.SAVE] == pytest.approx(0.75)


def test_a_recovery_is_divided_into_its_parts_from_the_newest_step_on():
    history = [
        event(0, EventName.PROCESS_START),
        *training(1, 5),
        *restarted(10, generation=1, since=6),
        *training(14, 3, first=6, generation=1),
    ]
    account = account_of(read([history]))
    (outage,) = account.outages
    assert (outage.end_us - outage.start_us) / 1e6 == 8
    (of_outage,) = account.processes[0].outages_us
    assert {part: taken / 1e6 for part, taken in of_outage.items()} == pytest.approx(
        {
            Part.DETECT: 2,
            Part.TEARDOWN: 1,
            Part.RENDEZVOUS: 1,
            Part.BUILD: 0.5,
            Part.PLAN: 0.5,
            Part.FETCH: 1,
            Part.REPLAY: 1.5,
            Part.WAIT: 0.5,
        }
    )
    assert (account.faults, account.time_to_recover_s) == (1, 8)
    assert account.steps == 8


def test_steps_that_are_trained_again_were_lost():
    history = [
        event(0, EventName.PROCESS_START),
        *training(1, 5),
        *restarted(10, generation=1, since=6),
        *training(14, 4, first=4, generation=1),
    ]
    account = account_of(read([history]))
    found = seconds(account.processes[0])
    assert found[Part.USEFUL] == pytest.approx(3 * 0.8 + 4 * 0.8)
    assert found[Part.LOST] == pytest.approx(2 * 0.9)
    assert account.steps == 7


def test_between_launches_all_processes_are_down():
    launches = [
        [event(0, EventName.PROCESS_START, rank=rank), *training(1, 3, rank=rank)]
        for rank in range(2)
    ]
    again = [
        [event(20, EventName.PROCESS_START, rank=rank), *training(25, 2, first=4, rank=rank)]
        for rank in range(2)
    ]
    account = account_of(read([*launches, *again]))
    assert account.launches == 2
    for process in account.processes:
        assert seconds(process)[Part.DOWN] == 16
        assert len(process.lives) == 2
    assert account.faults == 1
    assert account.time_to_recover_s == 21


def test_the_rest_of_a_launch_is_gone_for_a_process_that_has_ended():
    histories = [
        [event(0, EventName.PROCESS_START, rank=rank), *training(1, steps, rank=rank)]
        for rank, steps in ((0, 9), (1, 4))
    ]
    account = account_of(read(histories))
    assert [seconds(one).get(Part.GONE) for one in account.processes] == [None, 5]


def test_two_processes_of_one_rank_are_two_processes():
    histories = [
        [event(0, EventName.PROCESS_START), *training(1, 5)],
        [event(4, EventName.PROCESS_START, generation=1), *training(6, 3, generation=1)],
    ]
    account = account_of(read(histories))
    assert [one.process for one in account.processes] == [0, 1]
    assert account.ranks == 1


def test_the_time_before_a_known_death_is_lost_and_that_after_it_is_detection():
    survivor = [
        launched(0),
        event(1, EventName.PROCESS_START),
        *training(1, 5),
        *restarted(10, generation=1, since=6),
        *training(14, 3, first=6, generation=1),
    ]
    dead = [launched(1), event(1, EventName.PROCESS_START, rank=1), *training(1, 5, rank=1)]
    launcher = [ended(6.5, 1, -9), ended(17, 0, 0)]
    account = account_of(read([survivor, dead, launcher]))
    (outage,) = account.outages
    assert outage.end_us - outage.start_us == 8_000_000
    found = [seconds(one) for one in account.processes]
    assert [one[Part.LOST] for one in found] == [0.5, 0.5]
    assert found[0][Part.DETECT] == 1.5
    assert found[1][Part.GONE] == 10.5
    assert [life.code for one in account.processes for life in one.lives] == [0, -9]


def test_a_process_that_was_killed_before_it_said_a_word_was_starting():
    there = [launched(0), event(1, EventName.PROCESS_START), *training(1, 5)]
    account = account_of(read([there, [ended(2, 1, -9), ended(8, 0, 0)]]))
    assert seconds(account.processes[1]) == {Part.START_UP: 2, Part.GONE: 6}


def test_a_launch_that_has_ended_well_is_no_fault_for_the_next_one():
    launches = [
        [launched(0, launch=name, at=at), *training(at + 1, 3, first=first), ended_by_itself]
        for name, at, first, ended_by_itself in (
            ("a", 0, 1, event(5, EventName.PROCESS_END, rank=-1, child=1, code=0)),
            ("b", 20, 4, event(25, EventName.PROCESS_END, rank=-1, child=1, code=0)),
        )
    ]
    account = account_of(read(launches))
    assert (account.launches, account.faults, account.steps) == (2, 0, 6)
    assert seconds(account.processes[0])[Part.DOWN] == 15


@pytest.mark.parametrize(
    ("codes", "faults"),
    [((-9, 75), 1), ((-9, -9), 1), ((-9, 0), 0), ((-9, 130), 0), ((1, 2), 0), ((-9,), 0)],
)
def test_a_loss_that_ends_the_job_is_a_fault_before_a_launch_goes_on(codes, faults):
    ends = [ended(9, process, code) for process, code in enumerate(codes)]
    histories = [[launched(rank), *training(1, 5)] for rank in range(2)]
    account = account_of(read([*histories, ends]))
    assert (account.faults, len(account.outages)) == (faults, 0)


def test_once_a_launch_has_gone_on_the_loss_before_it_counts_once():
    launches = [
        [launched(0, launch=name, at=at), *training(at + 1, 3, first=first)]
        for name, at, first in (("a", 0, 1), ("b", 20, 4))
    ]
    ends = [ended(5, 0, 75, launch="a"), ended(26, 0, 0, launch="b")]
    account = account_of(read([*launches, ends]))
    assert (account.launches, account.faults, account.was_lost) == (2, 1, False)


def test_a_job_that_stops_in_a_recovery_has_the_faults_of_the_recovery():
    restart = itertools.islice(restarted(10, generation=1, since=6), 1)
    history = [launched(0), *training(1, 5), *restart]
    account = account_of(read([history, [ended(20, 0, 75)]]))
    assert (account.faults, account.was_lost, len(account.outages)) == (1, True, 1)


def test_launches_with_names_are_told_apart_where_they_overlap():
    launches = [
        [launched(0, launch=name, at=at), *training(at + 1, 3)] for name, at in (("a", 0), ("b", 3))
    ]
    account = account_of(read(launches))
    assert account.launches == 2
    assert sum(account.processes[0].parts_us.values()) == account.wall_us


def test_a_spare_waits_until_it_enters_a_generation():
    spare = [
        launched(2),
        event(2, EventName.SPARE, rank=-1),
        event(
            *(12, EventName.PROCESS_START),
            generation=1,
            entered_s=1010.0,
            joined_s=1011.0,
        ),
        *training(13, 2, generation=1),
    ]
    assert seconds(account_of(read([spare])).processes[0]) == pytest.approx(
        {
            Part.START_UP: 2,
            Part.SPARE: 8,
            Part.RENDEZVOUS: 1,
            Part.BUILD: 1,
            Part.PLAN: 1,
            Part.USEFUL: 1.6,
            Part.STALL: 0.2,
            Part.BETWEEN: 0.2,
        }
    )


def test_faults_that_follow_each_other_are_one_outage():
    history = [
        event(0, EventName.PROCESS_START),
        *training(1, 5),
        *itertools.islice(restarted(10, generation=1, since=6), 1),
        *restarted(20, generation=2, since=6),
        *training(24, 3, first=6, generation=2),
    ]
    account = account_of(read([history]))
    (outage,) = account.outages
    assert (outage.faults, outage.end_us - outage.start_us) == (2, 18_000_000)
    found = seconds(account.processes[0])
    assert Part.UNEXPLAINED not in found
    assert found[Part.DETECT] == 2 + 8
