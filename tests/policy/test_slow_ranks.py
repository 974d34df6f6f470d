"""Slow ranks: told of once, when they were slow for several steps in a row."""

from megatron_moevement.policy.watching.slow_ranks import STEPS_IN_A_ROW, SlowRank, SlowRankWatch

EVEN = (1.0, 1.1, 0.9, 1.0)
SLOW = (1.0, 1.1, 0.9, 3.0)


def told(*steps, factor=2.0):
    watch, found = SlowRankWatch(factor), []
    for own_s in steps:
        watch, slow = watch.after(own_s)
        found.append(slow)
    return found


def test_a_rank_that_is_slow_for_long_is_told_of_once():
    found = told(*[SLOW] * (STEPS_IN_A_ROW + 2))
    silent = [()] * (STEPS_IN_A_ROW - 1)
    assert found == [*silent, (SlowRank(3, 3.0, 1.05),), (), ()]


def test_single_slow_steps_are_nothing():
    assert not any(told(SLOW, SLOW, EVEN, SLOW, SLOW, EVEN))


def test_a_rank_that_was_quick_meanwhile_is_told_of_again():
    found = told(*[SLOW] * STEPS_IN_A_ROW, EVEN, *[SLOW] * STEPS_IN_A_ROW)
    assert sum(map(len, found)) == 2


def test_the_factor_says_what_is_slow():
    assert any(told(*[SLOW] * STEPS_IN_A_ROW, factor=2.8))
    assert not any(told(*[SLOW] * STEPS_IN_A_ROW, factor=2.9))


def test_of_two_ranks_the_slow_one_is_found():
    (*_, (slow,)) = told(*[(1.0, 2.1)] * STEPS_IN_A_ROW)
    assert slow == SlowRank(1, 2.1, 1.0)


def test_a_single_rank_and_unknown_times_are_never_slow():
    assert not any(told(*[(5.0,)] * 5))
    assert not any(told(*[()] * 5))
