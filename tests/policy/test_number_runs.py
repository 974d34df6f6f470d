# SPDX-License-Identifier: Apache-2.0
"""Runs of numbers: short, and the same numbers again."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.number_runs import numbers_of, runs_of


def test_numbers_that_follow_each_other_are_one_run():
    assert list(runs_of(range(8192))) == [[0, 8191]]
    assert list(runs_of({5, 3, 4, 9})) == [[3, 5], [9, 9]]
    assert list(runs_of(())) == []


@given(st.sets(st.integers(0, 40)))
def test_runs_have_the_same_numbers(numbers):
    runs = list(runs_of(numbers))
    assert numbers_of(runs) == sorted(numbers)
    assert all(former[1] + 1 < later[0] for former, later in itertools.pairwise(runs))
