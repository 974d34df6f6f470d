# SPDX-License-Identifier: Apache-2.0
"""Measurements are robust, and what ranks bring to the barrier becomes the worst of them."""

import functools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.watching.measurements import (
    NOT_MEASURED,
    Contention,
    CpuTimes,
    Measured,
    MeasuredStep,
    Reduced,
    Work,
    achieved_bytes_per_s,
)

rates = st.integers(1, 10**12)
measurements = st.builds(
    Measured,
    st.none() | rates.map(float),
    st.none() | rates.map(float),
    st.integers(1, 10**9).map(lambda value: value / 10**6),
    st.integers(0, 10**9).map(lambda value: value / 10**6),
    st.integers(0, 10**9).map(lambda value: value / 10**6),
    st.none() | st.integers(0, 10**9).map(lambda value: value / 10**6),
)


@given(rate=st.integers(1, 10**9), sizes=st.lists(st.integers(1, 10**6), min_size=1, max_size=16))
def test_pieces_of_one_rate_have_this_bandwidth(rate, sizes):
    history = [Work(size * rate, float(size)) for size in sizes]
    assert achieved_bytes_per_s(history) == rate


def is_odd(work):
    """Returns whether a piece has another rate: with the same one it may count, and round sums."""
    return work.size_bytes / work.spent_s != 1000


@given(
    seed=st.integers(0, 2**31),
    count=st.integers(4, 16),
    odd=st.lists(st.builds(Work, st.integers(1, 10**9), st.floats(1e-9, 1e9)).filter(is_odd)),
)
def test_odd_pieces_up_to_a_quarter_do_not_move_a_bandwidth(seed, count, odd):
    history = [Work(1000, 1.0)] * (count - count // 4) + odd[: count // 4]
    random.Random(seed).shuffle(history)
    assert achieved_bytes_per_s(history) == 1000


def test_nothing_has_no_bandwidth():
    assert achieved_bytes_per_s([]) is None
    assert achieved_bytes_per_s([Work(0, 1.0), Work(5, 0.0)]) is None


def reduced(votes):
    return functools.reduce(lambda a, b: Reduced(*map(max, a, b)), votes)


@given(st.lists(st.none() | measurements, min_size=1, max_size=5))
def test_the_greatest_numbers_of_all_ranks_are_the_worst_measurements(ranks):
    votes = [NOT_MEASURED if rank is None else rank.vote for rank in ranks]
    worst = Measured.worst(reduced(votes))
    if None in ranks:
        assert worst is None
        return

    def least(name):
        return min(filter(None, (getattr(rank, name) for rank in ranks)), default=None)

    assert worst == Measured(
        least("to_host_bytes_per_s"),
        least("to_holder_bytes_per_s"),
        least("iteration_s"),
        max(rank.stall_s for rank in ranks),
        max(rank.contention_s for rank in ranks),
        max((rank.delay_s for rank in ranks if rank.delay_s is not None), default=None),
    )


@given(measurements)
def test_numbers_fit_into_a_barrier(measured):
    assert all(-(2**63) <= number < 2**63 for number in measured.vote)
    assert Measured.worst(measured.vote) == pytest.approx(measured)


def test_a_rank_measures_the_newest_slots_that_are_not_empty_and_its_slowest_holder():
    steps = [MeasuredStep(3.0, 1.0), MeasuredStep(2.0, 0.0)]
    captured = [Work(9, 1.0), Work(100, 1.0), Work(300, 1.0), Work(0, 0.5), Work(0, 0.5)]
    sent = [[Work(50, 1.0), Work(0, 9.0)], [Work(80, 1.0)], []]
    assert Measured.of(captured, sent, steps) == Measured(200.0, 50.0, 2.0, 0.5)
    assert Measured.of([Work(0, 1.0)], [], steps) == Measured(None, None, 2.0, 0.5)
    busy = Contention(0.25, 0.5)
    assert Measured.of(captured, sent, steps, busy) == Measured(200.0, 50.0, 2.0, 0.5, 0.5, 1.0)


BEFORE = CpuTimes({1: 3.0, 2: 1.0}, process_s=10.0, idle_s=5.0, cores_s=40.0)


def after(beside_s, process_s, idle_s, cores_s):
    """Returns CPU times so much later."""
    return CpuTimes(
        beside_s, BEFORE.process_s + process_s, BEFORE.idle_s + idle_s, BEFORE.cores_s + cores_s
    )


def test_threads_beside_training_take_their_share_of_the_process_where_cores_are_busy():
    beside_s = {1: 3.5, 2: 2.0, 3: 0.5}  # the third began meanwhile
    assert after(beside_s, 8.0, 1.0, 20.0).taken_share(BEFORE) == 2.0 / 8.0
    assert after(beside_s, 8.0, 2.0, 20.0).taken_share(BEFORE) == 2.0 / 8.0
    assert after(beside_s, 8.0, 2.001, 20.0).taken_share(BEFORE) == 0


def test_threads_beside_training_take_no_more_than_the_others_wait_for_cores():
    def share(waited_before, waited, spent_s=2.0):
        before = BEFORE._replace(clock_s=50.0, waited_s=waited_before)
        now = after({1: 3.0 + spent_s}, 8.0, 1.0, 20.0)
        return now._replace(clock_s=60.0, waited_s=waited).taken_share(before)

    waited_before, waited = {7: 4.0, 8: 0.5}, {7: 4.25, 9: 0.5}  # one ended, another began
    assert share(waited_before, waited) == 0.75 / 10
    assert share(waited_before, waited, 0.5) == 0.5 / 8
    assert share(waited_before, waited_before) == 0
    assert share(None, waited) == share(waited_before, None) == 2.0 / 8.0
    at_once = BEFORE._replace(waited_s=waited_before)
    later = after({1: 5.0}, 8.0, 1.0, 20.0)._replace(waited_s=waited_before)
    assert later.taken_share(at_once) == 2.0 / 8.0


def test_passes_are_delayed_by_what_their_own_threads_wait_for_cores():
    before = BEFORE._replace(clock_s=50.0, waited_s={7: 4.0, 8: 0.5, 9: 1.0})
    now = BEFORE._replace(clock_s=60.0, waited_s={7: 4.25, 8: 9.5, 9: 1.5}, passes={7, 9})
    assert now.delayed_share(before) == 0.75 / 10
    assert now.delayed_share(BEFORE) is None


def test_threads_that_ended_or_have_a_former_one_s_number_take_nothing():
    assert after({2: 1.5}, 8.0, 0.0, 20.0).taken_share(BEFORE) == 0.5 / 8.0
    assert after({1: 0.5, 2: 1.0}, 8.0, 0.0, 20.0).taken_share(BEFORE) == 0
    assert after({1: 4.0}, 0.0, 0.0, 0.0).taken_share(BEFORE) == 0
    assert after({1: 4.0}, 8.0, 0.0, 0.0).taken_share(BEFORE) == 0  # no core is known
