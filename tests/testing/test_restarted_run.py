# SPDX-License-Identifier: Apache-2.0
"""When a process of a restarted run is killed from outside."""

from random import Random

from tests.harness.restarted_run import moment_of_kill

BUILDING_S, STEP_S = 60.0, 4.0
"""The first step of a process takes much longer."""


def test_a_kill_from_outside_falls_into_every_part_of_the_next_two_steps():
    random = Random(0)
    durations = [BUILDING_S, *[STEP_S] * 4]
    drawn = [moment_of_kill(durations, random) for _ in range(200)]
    assert {int(4 * one / STEP_S) for one in drawn} == set(range(8))
