# SPDX-License-Identifier: Apache-2.0
"""The forecast of W: a slot is hidden by iterations as long as the slower leg takes for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.preflight.forecast import WindowOptions
from megatron_moevement.policy.preflight.window_forecast import (
    Rates,
    forecast_windows,
    settled_choice,
)
from megatron_moevement.policy.watching.window_choice import STALL_SHARE, Reason
from megatron_moevement.policy.window.bandwidth import PathBandwidth

OPTIONS = WindowOptions(first=4, slots={4: 500, 1: 1200, 2: 800, 8: 400})
whole = st.integers(1, 10**6)


def hidden_from(rates, replicas):
    """Returns for each W the iteration that hides its slots."""
    return {one.window: one.hiding_s for one in forecast_windows(OPTIONS, rates, replicas)}


def test_the_slower_leg_hides_a_slot():
    by_copy = {1: 12.0, 2: 8.0, 4: 5.0, 8: 4.0}
    assert hidden_from(Rates(100.0, 200.0), 2) == by_copy
    assert hidden_from(Rates(400.0, 100.0), 2) == by_copy  # each holder brings its own bandwidth
    assert hidden_from(Rates(100.0, None), 2) == by_copy
    assert hidden_from(Rates(100.0, 1.0), 0) == by_copy


def test_replays_are_those_of_a_fault_before_the_next_window_is_persisted():
    steps = {one.window: one.replayed_steps for one in forecast_windows(OPTIONS, Rates(1.0), 2)}
    assert steps == {1: 1, 2: 3, 4: 7, 8: 15}
    assert list(steps) == sorted(steps)


def test_an_iteration_waits_for_what_it_does_not_hide():
    first, *_, last = forecast_windows(OPTIONS, Rates(100.0), 0)
    assert (first.stall_s(10.0), last.stall_s(10.0)) == (2.0, 0.0)


@given(whole, whole, st.integers(0, 4), st.integers(1, 1000), whole)
def test_what_hides_a_slot_is_what_has_room_for_it_in_its_budget(
    to_host, network, replicas, iteration_s, slot_bytes
):
    path = PathBandwidth(to_host, network, replicas)
    # As `slot_budget_bytes`, in whole numbers.
    room = slot_bytes <= to_host * iteration_s
    if replicas:
        room = room and slot_bytes * replicas <= network * iteration_s
    assert (path.hiding_s(slot_bytes) <= iteration_s) is room


def test_the_log_is_copied_before_the_slot():
    assert PathBandwidth(100, 1000, 2, log_bytes=50).hiding_s(150) == 2.0


@pytest.mark.parametrize(
    ("iteration_s", "chosen"),
    [
        (16.1, 1),  # three quarters of it hide a slot of W = 1
        (15.9, 2),
        (10.7, 2),
        (10.6, 4),  # W = 2 would fit: with less of a margin than a smaller W is tried for
        (5.0, 4),
        (4.9, 8),  # W = 4 stalls by 2 %
        (1.0, 8),
    ],
)
def test_a_job_comes_to_the_w_that_its_controller_settles_at(iteration_s, chosen):
    choice = settled_choice(OPTIONS, Rates(100.0, 100.0), 2, iteration_s)
    assert choice.window == chosen


def test_where_nothing_fits_the_choice_says_so():
    assert settled_choice(OPTIONS, Rates(100.0), 2, 1.0).reason is Reason.NO_WINDOW_FITS


@given(st.floats(0.1, 100.0), st.floats(10.0, 1e4), st.floats(10.0, 1e4), st.integers(0, 3))
def test_a_settled_job_stalls_only_where_each_w_does(iteration_s, to_host, to_holder, replicas):
    rates = Rates(to_host, to_holder)
    window = settled_choice(OPTIONS, rates, replicas, iteration_s).window
    stalls = {
        one.window: one.stall_s(iteration_s) for one in forecast_windows(OPTIONS, rates, replicas)
    }
    assert stalls[window] <= max(STALL_SHARE * iteration_s, min(stalls.values()))
