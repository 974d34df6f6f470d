# SPDX-License-Identifier: Apache-2.0
"""Faults on purpose: what the flag takes, and what it refuses."""

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.policy.faults.fault_schedule import FaultKind
from megatron_moevement.settings.faults import Fault, FaultPoint
from megatron_moevement.testing.world.step_model import Command, Section
from tests.harness.tiny_job import tiny_arguments


def test_a_fault_names_a_step_a_place_and_ranks():
    flags = ("--moevement-faults", "7:barrier", "8:commit@0,2", "stop:3:send@1#2")
    assert tiny_arguments(*flags, world_size=3).fault_injection.moevement_faults == (
        Fault(7, FaultPoint.BARRIER),
        Fault(8, FaultPoint.COMMIT, frozenset({0, 2})),
        Fault(3, FaultPoint.SEND, frozenset({1}), generation=2, kind=FaultKind.STOP),
    )
    assert tiny_arguments().fault_injection.moevement_faults == ()


@pytest.mark.parametrize("kind", FaultKind)
@pytest.mark.parametrize("generation", [0, 3])
@pytest.mark.parametrize("ranks", [None, frozenset({0, 2})])
def test_a_fault_reads_what_it_prints(kind, generation, ranks):
    fault = Fault(7, FaultPoint.BARRIER, ranks, generation, kind)
    assert Fault.parse(str(fault)) == fault


def test_a_fault_belongs_to_one_generation():
    assert Fault.parse("3:fetch@1#2") == Fault(3, FaultPoint.FETCH, frozenset({1}), generation=2)
    assert Fault.parse("3:fetch").generation == 0


def test_a_fault_strikes_all_ranks_or_those_that_it_names():
    assert [Fault.parse("3:send").strikes(process) for process in range(3)] == [True, True, True]
    assert [Fault.parse("3:send@1").strikes(process) for process in range(3)] == [
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("place", FaultPoint)
def test_every_place_can_be_named(place):
    assert Fault.parse(f"1:{place.value}") == Fault(1, place)


def test_places_have_the_names_of_the_commands_of_a_step():
    commands = {one.name.lower().replace("_", "-") for one in (*Command, *Section)}
    assert {place.value for place in FaultPoint} & commands == {
        "forward-backward",
        "finalize",
        "prepare",
        "barrier",
        "commit",
        "optimizers",
        "ledger",
        "committed",
        "capture",
    }


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("barrier", "is not [KIND:]STEP:PLACE"),
        ("7", "is not [KIND:]STEP:PLACE"),
        ("7:", "is not [KIND:]STEP:PLACE"),
        ("-1:barrier", "expected at least one argument"),
        ("x:barrier", "is not [KIND:]STEP:PLACE"),
        ("7:barrier@", "is not [KIND:]STEP:PLACE"),
        ("7:barrier@a", "is not [KIND:]STEP:PLACE"),
        ("7:barrier@0,", "is not [KIND:]STEP:PLACE"),
        ("7:barrier#", "is not [KIND:]STEP:PLACE"),
        ("7:barrier#x", "is not [KIND:]STEP:PLACE"),
        ("stop:barrier", "is not [KIND:]STEP:PLACE"),
        ("hang:7:barrier", "names no fault: hang; there are kill, stop, exception, exit, segfault"),
        ("9:barrier", "kill:9:barrier can never strike, the last step is 8"),
        ("7:nowhere", "names no place of a step: nowhere; there are forward, forward-backward"),
        ("7:barrier@0,2", "there is no rank 2, the job has 2; name ranks from 0 to 1"),
    ],
)
def test_what_is_no_fault_is_refused_in_one_line(spec, reason):
    with pytest.raises(UserError, match="--moevement-faults") as refused:
        tiny_arguments("--moevement-faults", spec, world_size=2)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_two_faults_at_one_place_of_one_rank_are_refused():
    apart = ("7:barrier@0", "stop:7:barrier@1", "exit:7:barrier@0#1", "7:commit@0")
    assert (
        len(
            tiny_arguments(
                "--moevement-faults", *apart, world_size=2
            ).fault_injection.moevement_faults
        )
        == 4
    )
    with pytest.raises(UserError, match="rank 1 is struck 2 times at 7:barrier"):
        tiny_arguments("--moevement-faults", "7:barrier", "stop:7:barrier@1", world_size=2)
