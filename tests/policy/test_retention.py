# SPDX-License-Identifier: Apache-2.0
"""Retention: what the persisted window needs is kept, all else goes."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.copies.retention import max_log_steps, max_replayed_steps, retain
from megatron_moevement.policy.copies.slot_ring import ring_capacity
from megatron_moevement.policy.window.schedule import Window

WINDOWS = st.builds(Window, st.integers(0, 20), st.integers(1, 5))


def replayed_steps(window, target):
    """Returns the steps whose logs a recovery from a window to S_target reads."""
    return range(window.start + 1, target + 1)


@given(WINDOWS, st.integers(0, 20))
def test_what_a_recovery_reads_is_never_dropped(window, ahead):
    kept = retain(window, first_step=0)
    needed = replayed_steps(window, window.start + ahead)
    assert kept.oldest_slot_step == window.start
    assert all(step >= kept.oldest_log_step for step in needed)


@given(WINDOWS)
def test_what_no_recovery_reads_is_dropped(window):
    kept = retain(window, first_step=0)
    assert kept.oldest_log_step == window.start + 1
    assert replayed_steps(window, window.start + 1)[0] == kept.oldest_log_step


def test_nothing_is_dropped_before_a_window_is_persisted():
    kept = retain(None, first_step=7)
    assert (kept.oldest_slot_step, kept.oldest_log_step) == (7, 8)


@given(st.integers(1, 8), st.integers(0, 3))
def test_a_log_has_room_for_as_many_steps_as_the_ring_has_slots(window, lag):
    assert max_log_steps(window, lag + 1) == ring_capacity(window, lag)


@given(st.integers(1, 6), st.integers(0, 3), st.integers(0, 40))
def test_bounds_are_those_of_training_with_that_lag(window, lag, step):
    """Walks through training: at step k a window is persisted whose last slot is S_(k - L)."""
    persisted = [start for start in range(0, step + 1, window) if start + window - 1 + lag < step]
    if not persisted:
        return
    replayed = replayed_steps(Window(persisted[-1], window), step - 1)  # step k is interrupted
    assert len(replayed) <= max_replayed_steps(window, lag)
    assert len(replayed) + 1 <= max_log_steps(window, lag)


def test_the_bounds_are_attained():
    window, lag = 4, 1
    worst = 0
    for step in range(window + lag, 60):
        start = max(s for s in range(0, step, window) if s + window - 1 + lag < step)
        worst = max(worst, len(replayed_steps(Window(start, window), step - 1)))
    assert worst == max_replayed_steps(window, lag) == 7
