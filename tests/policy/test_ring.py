# SPDX-License-Identifier: Apache-2.0
"""The ring of slots: it holds what it must, overwrites nothing, and says when it is full."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.copies.slot_ring import RingFullError, SlotRing, ring_capacity


def test_capacity_is_two_windows_and_the_lag():
    assert ring_capacity(3, 2) == 8


@pytest.mark.parametrize(("window", "lag"), [(0, 1), (1, -1)])
def test_impossible_rings_are_refused(window, lag):
    with pytest.raises(ValueError, match="no ring"):
        ring_capacity(window, lag)


@given(
    st.integers(1, 6),
    st.lists(st.one_of(st.none(), st.integers(0, 30)), max_size=40),
)
def test_no_two_slots_that_are_held_share_a_buffer(capacity, events):
    ring = SlotRing(capacity, oldest=3, next_step=3)
    for event in events:
        if event is not None:
            dropped = ring.dropped_before(event)
            assert list(dropped.steps) == [step for step in ring.steps if step >= event]
            ring = dropped
        elif ring.is_full:
            with pytest.raises(RingFullError, match=f"step {ring.next_step}"):
                ring.captured()
        else:
            ring = ring.captured()
        buffers = {step % capacity for step in ring.steps}
        assert len(buffers) == len(ring.steps)


@given(st.integers(1, 6), st.integers(0, 4), st.integers(1, 5))
def test_training_never_waits_while_acknowledgements_keep_to_the_lag(window, lag, num_windows):
    ring = SlotRing(ring_capacity(window, lag))
    for step in range(num_windows * window + lag):
        ring = ring.captured()
        complete = step - (window - 1) - lag  # first step of the window persisted now
        if complete >= 0 and complete % window == 0:
            ring = ring.dropped_before(complete)


@pytest.mark.parametrize(("oldest", "next_step"), [(1, 0), (0, 5)])
def test_a_ring_holds_no_more_than_it_has_buffers(oldest, next_step):
    with pytest.raises(ValueError, match="can't hold"):
        SlotRing(4, oldest=oldest, next_step=next_step)
