# SPDX-License-Identifier: Apache-2.0
"""Slow ranks: told of once, when they were slow for several steps, until they are quick again."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.watching.slow_ranks import (
    QUICK_STEPS_IN_A_ROW,
    STEPS_IN_A_ROW,
    ChangedRank,
    SlowRankWatch,
)

EVEN = (1.0, 1.1, 0.9, 1.0)
SLOW = (1.0, 1.1, 0.9, 3.0)
BETWEEN = (1.0, 1.1, 0.9, 1.8)
"""Neither slow nor quick."""


def changes(*steps, factor=2.0):
    watch, found = SlowRankWatch(factor), []
    for own_s in steps:
        watch, changed = watch.after(own_s)
        found.append(changed)
    return found


def told(*steps, factor=2.0):
    """Returns what was told in all steps: rank, and whether it is slow now."""
    return [(one.rank, one.is_slow) for each in changes(*steps, factor=factor) for one in each]


def test_a_rank_that_is_slow_for_long_is_told_of_once():
    found = changes(*[SLOW] * 200)
    assert found[STEPS_IN_A_ROW - 1] == (ChangedRank(3, 3.0, 1.05, is_slow=True),)
    assert sum(map(len, found)) == 1


def test_single_slow_steps_are_nothing():
    assert told(SLOW, SLOW, EVEN, SLOW, SLOW, EVEN) == []


def test_a_rank_that_was_quick_for_long_is_told_of_and_told_of_again():
    steps = [*[SLOW] * STEPS_IN_A_ROW, *[EVEN] * QUICK_STEPS_IN_A_ROW, *[SLOW] * STEPS_IN_A_ROW]
    assert told(*steps) == [(3, True), (3, False), (3, True)]


def test_a_slow_rank_with_some_quick_steps_is_not_told_of_again():
    steps = [*[EVEN] * (QUICK_STEPS_IN_A_ROW - 1), *[SLOW] * STEPS_IN_A_ROW]
    assert told(*[SLOW] * STEPS_IN_A_ROW, *steps * 20) == [(3, True)]


def test_one_between_the_limits_stays_what_it_is():
    assert told(*[BETWEEN] * 200) == []
    assert told(*[SLOW] * STEPS_IN_A_ROW, *[BETWEEN] * 200) == [(3, True)]


def test_what_nobody_feels_is_not_told_of():
    assert told(*[(0.04, 0.04, 0.04, 0.127)] * 200) == []
    assert told(*[(0.04, 0.04, 0.04, 0.3)] * 200) == [(3, True)]


def test_the_factor_says_what_is_slow():
    assert told(*[SLOW] * STEPS_IN_A_ROW, factor=2.8)
    assert not told(*[SLOW] * STEPS_IN_A_ROW, factor=2.9)


def test_of_two_ranks_the_slow_one_is_found():
    (*_, (slow,)) = changes(*[(1.0, 2.1)] * STEPS_IN_A_ROW)
    assert slow == ChangedRank(1, 2.1, 1.0)


def test_a_single_rank_and_unknown_times_are_never_slow():
    assert not told(*[(5.0,)] * 5)
    assert not told(*[()] * 5)


TIMES = st.floats(min_value=0.001, max_value=10)


@given(st.lists(st.lists(TIMES, min_size=4, max_size=4), max_size=60))
def test_slow_and_quick_take_turns_and_a_rank_is_told_of_seldom(steps):
    last = dict.fromkeys(range(4), (False, -1))
    watch = SlowRankWatch(2.0)
    for number, own_s in enumerate(steps):
        watch, changed = watch.after(own_s)
        for one in changed:
            was_slow, since = last[one.rank]
            assert one.is_slow is not was_slow
            assert number - since >= (QUICK_STEPS_IN_A_ROW if was_slow else STEPS_IN_A_ROW)
            last[one.rank] = (one.is_slow, number)
        assert watch.slow == {rank for rank, (is_slow, _) in last.items() if is_slow}
