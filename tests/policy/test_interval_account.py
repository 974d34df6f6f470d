# SPDX-License-Identifier: Apache-2.0
"""What lies between two events of an interval of steps is accounted for by their sums."""

import pytest

from megatron_moevement.policy.accounting.account import account_of
from megatron_moevement.policy.accounting.event import EventName
from megatron_moevement.policy.accounting.parts import Part
from tests.harness.job_events import (
    ended,
    event,
    interval,
    launched,
    read,
    restarted,
    seconds,
    training,
    trains,
)


def test_the_sums_of_an_interval_are_its_parts_and_what_is_left_lies_between():
    account = account_of(
        read([[event(0, EventName.PROCESS_START), trains(1), interval(11, 1, 10)]])
    )
    assert seconds(account.processes[0]) == pytest.approx(
        {Part.START_UP: 1, Part.USEFUL: 8, Part.STALL: 1, Part.BETWEEN: 1}
    )
    assert account.steps == 10


def test_steps_of_an_interval_that_are_trained_again_were_lost():
    history = [
        event(0, EventName.PROCESS_START),
        *(trains(1), interval(11, 1, 10)),
        *restarted(15, generation=1, since=11),
        *training(19, 4, first=8, generation=1),
    ]
    found = seconds(account_of(read([history])).processes[0])
    assert found[Part.LOST] == pytest.approx(3 * 0.9)
    assert found[Part.USEFUL] == pytest.approx(7 * 0.8 + 4 * 0.8)


def test_a_killed_process_had_the_steps_that_others_recorded_after_its_last_event():
    survivor = [
        launched(0),
        *(event(1, EventName.PROCESS_START), trains(1), interval(21, 1, 20)),
        *restarted(25, generation=1, since=21),
        *training(29, 3, first=21, generation=1),
    ]
    dead = [
        launched(1),
        *(event(1, EventName.PROCESS_START, rank=1), trains(1, rank=1)),
        interval(11, 1, 10, rank=1),
    ]
    account = account_of(read([survivor, dead, [ended(21.5, 1, -9), ended(32, 0, 0)]]))
    found = seconds(account.processes[1])
    assert found[Part.LOST] == 0.5
    assert found[Part.USEFUL] == pytest.approx(8 + 10)
    assert account.steps == 23


def test_steps_that_all_took_along_count_if_the_next_launch_goes_on_after_them():
    killed = [launched(0), event(1, EventName.PROCESS_START), trains(1), interval(11, 1, 10)]
    again = [
        launched(0, launch="b", at=20),
        *(event(21, EventName.PROCESS_START), *training(22, 3, first=15)),
    ]
    account = account_of(read([killed, again, [ended(16.5, 0, -9)]]))
    found = seconds(account.processes[0])
    assert account.steps == 17
    assert found[Part.LOST] == pytest.approx(1.5)  # of the sixteenth second on
    assert found[Part.USEFUL] == pytest.approx(8 + 4 + 3 * 0.8)
