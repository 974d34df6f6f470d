"""Bandwidth: the budget of a slot, and a controller that does not flutter."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.bandwidth import (
    ControllerState,
    Hysteresis,
    Measurement,
    PathBandwidth,
    propose_window,
)

SECOND = timedelta(seconds=1)
PRICES = {1: 1000, 2: 600, 3: 450, 4: 400}


@pytest.mark.parametrize(
    ("path", "budget"),
    [
        (PathBandwidth(100, 1000, 2), 200),
        (PathBandwidth(100, 60, 2), 60),
        (PathBandwidth(100, 60, 0), 200),
        (PathBandwidth(100, 1000, 2, log_bytes=50), 150),
        (PathBandwidth(100, 1000, 2, log_bytes=500), 0),
    ],
)
def test_the_slower_leg_bounds_the_slot(path, budget):
    assert path.slot_budget_bytes(2 * SECOND) == budget


@pytest.mark.parametrize("values", [(0, 1, 1), (1, 0, 1), (1, 1, -1), (1, 1, 1, -1)])
def test_impossible_paths_are_refused(values):
    with pytest.raises(ValueError, match="must"):
        PathBandwidth(*values)


@pytest.mark.parametrize(
    "values", [{"patience": 0}, {"headroom": 1.0}, {"smoothing": 0.0}, {"smoothing": 1.5}]
)
def test_impossible_settings_are_refused(values):
    with pytest.raises(ValueError, match="patience"):
        Hysteresis(**values)


def run(window, budgets, hysteresis, prices=PRICES):
    """Feeds measured budgets edge by edge; returns the proposals."""
    state = ControllerState()
    proposals = []
    for budget in budgets:
        state, proposal = propose_window(
            state, Measurement(budget, SECOND), window, prices, hysteresis
        )
        proposals.append(proposal)
        if proposal is not None:
            window = proposal
    return proposals


def test_a_longer_window_is_proposed_after_as_many_edges_as_patience_says():
    settings = Hysteresis(patience=3, smoothing=1.0)
    assert run(2, [500] * 4, settings) == [None, None, 3, None]


def test_a_shorter_window_needs_headroom():
    settings = Hysteresis(patience=2, headroom=0.1, smoothing=1.0)
    assert run(3, [660] * 4, settings) == [None] * 4  # 600 leaves less than a tenth free
    assert run(3, [667] * 4, settings) == [None, 2, None, None]


def test_after_a_change_patience_starts_anew():
    settings = Hysteresis(patience=3, smoothing=1.0)
    assert run(2, [500, 500, 500, 420, 420, 420], settings) == [None, None, 3, None, None, 4]


def test_the_shortest_window_with_headroom_is_proposed():
    assert run(4, [10_000], Hysteresis(patience=1)) == [1]


def test_one_bad_window_changes_nothing():
    settings = Hysteresis(patience=2, smoothing=1.0)
    assert run(2, [650, 100, 650, 100, 650], settings) == [None] * 5


def test_edges_that_disagree_on_the_direction_start_to_count_anew():
    settings = Hysteresis(patience=2, headroom=0.0, smoothing=1.0)
    assert run(3, [400, 700, 400, 700], settings) == [None] * 4


def test_measurements_are_smoothed():
    settings = Hysteresis(patience=1, smoothing=0.5)
    assert run(2, [600, 400], settings) == [None, 3]


def test_when_nothing_fits_the_least_bad_window_is_proposed():
    settings = Hysteresis(patience=1, smoothing=1.0)
    assert run(1, [10], settings) == [4]
    assert run(4, [10], settings) == [None]
    assert run(1, [10], settings, {1: 1000, 2: 1000}) == [None]


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=12), st.sampled_from(sorted(PRICES)))
def test_proposals_are_known_windows_other_than_the_one_in_force(budgets, window):
    settings = Hysteresis(patience=2)
    for proposal in run(window, budgets, settings):
        if proposal is not None:
            assert proposal in PRICES
            assert proposal != window
            window = proposal


@given(st.integers(1, 2000), st.sampled_from(sorted(PRICES)))
def test_a_steady_bandwidth_settles_after_one_change(budget, window):
    proposals = run(window, [budget] * 12, Hysteresis(patience=2))
    assert sum(proposal is not None for proposal in proposals) <= 1
