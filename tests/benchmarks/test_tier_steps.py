# SPDX-License-Identifier: Apache-2.0
"""Steps with and without the writing of a tier are told apart."""

import numpy as np
import pytest

from megatron_moevement.runtime.observation.events import EventName, EventRecord
from tests.harness.benchmarks import benchmark

W = 3


@pytest.fixture(scope="module")
def tier_steps():
    return benchmark("tier_steps")


def test_a_step_lasts_from_rank_to_rank_until_its_last_one_has_it(tier_steps):
    ends = {(1, 0): 1.0, (1, 1): 1.5, (2, 0): 4.0, (2, 1): 3.0, (4, 0): 9.0}
    events = [
        EventRecord(time, rank, 1, 0, step, EventName.ITERATION, {})
        for (step, rank), time in ends.items()
    ]
    assert tier_steps.durations_of(events) == {2: 2.5}


def test_a_pair_is_the_steps_in_which_slots_are_written_and_those_after_them(tier_steps):
    durations = {step: float(step) for step in range(5, 17)}
    (pair,) = tier_steps.pairs_of(durations, [2, 5, 11], W)
    writing, other = pair
    assert (list(writing), list(other)) == ([7, 8, 9], [10, 11, 12])


def test_pairs_that_are_all_the_same_have_no_width(tier_steps):
    figures = tier_steps.estimate(np.array([(3.0, 2.0)] * 5), draws=10)
    assert str(figures["ratio"]) == "1.5 (1.5 to 1.5)"


def test_the_interval_has_what_pairs_differ_in(tier_steps):
    figures = tier_steps.estimate(np.array([(1.0, 1.0), (2.0, 1.0)] * 5))
    assert figures["ratio"].low < 1.5 < figures["ratio"].high
