# SPDX-License-Identifier: Apache-2.0
"""Scripted faults strike once, in their generation, and are accounted for."""

import pytest

from megatron_moevement.runtime.faults.fault_effects import InjectedFaultError
from megatron_moevement.runtime.faults.fault_points import FaultPoints, never_struck
from megatron_moevement.settings.faults import Fault, FaultPoint


def faults(*specs):
    return [Fault.parse(f"exception:{spec}") for spec in specs]


def strikes(points, step, place):
    """Returns whether a fault strikes."""
    try:
        points.strike(step, place)
    except InjectedFaultError:
        return True
    return False


def test_a_fault_strikes_at_its_step_and_place_alone():
    points = FaultPoints(faults("7:barrier"))
    assert not strikes(points, 6, FaultPoint.BARRIER)
    assert not strikes(points, 7, FaultPoint.COMMIT)
    assert strikes(points, 7, FaultPoint.BARRIER)


def test_a_fault_strikes_once_though_the_step_is_done_again():
    points = FaultPoints(faults("7:barrier"))
    assert [strikes(points, 7, FaultPoint.BARRIER) for _ in range(3)] == [True, False, False]


def test_a_replay_in_the_next_generation_is_not_struck_again():
    points = FaultPoints(faults("7:barrier@0", "7:barrier@0#2"))
    struck = []
    for generation in range(4):
        points.enter(generation)
        struck.append(strikes(points, 7, FaultPoint.BARRIER))
    assert struck == [True, False, True, False]


def test_who_takes_a_rank_over_is_struck_by_the_faults_of_its_generation_alone():
    spare = FaultPoints(faults("7:barrier@2", "8:barrier@2#1", "9:barrier@3#1"), rank=2)
    spare.enter(1)
    assert not strikes(spare, 7, FaultPoint.BARRIER)
    assert strikes(spare, 8, FaultPoint.BARRIER)
    assert not strikes(spare, 9, FaultPoint.BARRIER)


def test_what_struck_in_a_former_launch_does_not_strike_again():
    points = FaultPoints(faults("7:barrier", "8:barrier"))
    points.know(["exception:7:barrier"])
    assert not strikes(points, 7, FaultPoint.BARRIER)
    assert strikes(points, 8, FaultPoint.BARRIER)


def test_outside_of_steps_a_fault_strikes_once_in_its_generation_whatever_its_step():
    points = FaultPoints(faults("7:facts", "9:facts#1", "8:plan"))
    struck = []
    for generation in range(3):
        points.enter(generation)
        for _ in range(2):
            try:
                points.strike_outside(FaultPoint.FACTS)
            except InjectedFaultError:
                struck.append(generation)
    assert struck == [0, 1]


def test_a_fault_outside_of_steps_must_strike_by_its_step():
    points = FaultPoints(faults("7:rejoin", "7:facts"))
    with pytest.raises(InjectedFaultError):
        points.strike_outside(FaultPoint.FACTS)
    points.begin_at(0)
    assert points.spared(6) == frozenset()
    assert points.spared(7) == {"exception:7:rejoin"}


def test_a_witness_is_told_before_it_strikes():
    points, told = FaultPoints(faults("7:barrier")), []
    points.tell(told.append)
    with pytest.raises(InjectedFaultError):
        points.of_step(7)(FaultPoint.BARRIER)
    assert told == faults("7:barrier")
    assert points.step == 7


def test_a_fault_that_should_have_struck_is_spared():
    points = FaultPoints(faults("4:gather", "7:barrier", "9:barrier"))
    points.begin_at(0)
    assert points.spared(8) == {"exception:4:gather", "exception:7:barrier"}
    assert strikes(points, 7, FaultPoint.BARRIER)
    assert points.spared(8) == {"exception:4:gather"}


def test_what_lies_behind_the_start_or_struck_before_is_not_spared():
    points = FaultPoints(faults("4:gather", "5:gather", "7:barrier"))
    points.know(["exception:7:barrier"])
    points.begin_at(4)
    assert points.spared(8) == {"exception:5:gather"}


def test_what_was_due_in_an_earlier_generation_stays_due():
    points = FaultPoints(faults("4:gather", "5:gather#1"))
    points.begin_at(0)
    points.enter(1)
    points.begin_at(4)
    assert points.spared(8) == {"exception:4:gather", "exception:5:gather#1"}


def test_what_struck_a_later_generation_of_a_former_launch_is_not_spared():
    points = FaultPoints(faults("5:gather#1", "6:gather#1"))
    points.know(["exception:5:gather#1"])
    points.begin_at(0)
    assert points.spared(8) == {"exception:6:gather#1"}


def test_a_fault_of_a_generation_that_never_came_is_spared():
    points = FaultPoints(faults("4:gather#2"))
    points.enter(1)
    points.begin_at(3)
    assert points.spared(8) == {"exception:4:gather#2"}
    points.enter(2)
    points.begin_at(3)
    assert strikes(points, 4, FaultPoint.GATHER)
    assert points.spared(8) == frozenset()


@pytest.mark.parametrize(
    ("spared_by", "never"),
    [([], False), ([0], False), ([2], False), ([0, 2], True), ([0, 1, 2], True)],
)
def test_a_fault_never_struck_if_all_ranks_that_it_names_were_spared(spared_by, never):
    (fault,) = faults("7:commit@0,2")
    spared = [(rank, [str(fault)] if rank in spared_by else []) for rank in range(3)]
    assert never_struck([fault], spared, 3) == ([str(fault)] if never else [])


def test_who_took_a_rank_over_can_not_say_that_the_dead_one_was_spared():
    (fault,) = faults("7:commit@1")
    spare = FaultPoints([fault], rank=1)
    spare.enter(1)
    spare.begin_at(4)
    assert never_struck([fault], [(0, []), (1, spare.spared(9))], 2) == []
