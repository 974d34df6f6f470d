# SPDX-License-Identifier: Apache-2.0
"""The lifecycle of a process in a generation: what may follow what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.recovery.lifecycle import (
    Event,
    IllegalEventError,
    Phase,
    advance,
)

RESTORED = [Event.AGREED, Event.SETTLED]
WAYS = {
    "replays": [*RESTORED, Event.REPLAYS, Event.REACHED, Event.BEGINS],
    "stands by": [*RESTORED, Event.STANDS_BY, Event.REACHED, Event.BEGINS],
    "begins": [Event.LOADS, Event.BEGINS],
    "replays from a checkpoint": [
        *(Event.LOADS, *RESTORED, Event.REPLAYS, Event.REACHED, Event.BEGINS),
    ],
}


def after(events):
    phase = Phase.PLANNING
    for event in events:
        phase = advance(phase, event)
    return phase


@pytest.mark.parametrize("way", WAYS)
def test_each_way_leads_to_training_and_to_its_end(way):
    assert after(WAYS[way]) is Phase.TRAINING
    assert after([*WAYS[way], Event.PAUSES, Event.BEGINS, Event.ENDS]) is Phase.ENDING


@pytest.mark.parametrize(
    "events",
    [
        [Event.SETTLED],
        [Event.AGREED, Event.REPLAYS],
        [*RESTORED, Event.BEGINS],
        [*RESTORED, Event.REPLAYS, Event.BEGINS],
        [*WAYS["replays"], Event.AGREED],
        [*WAYS["begins"], Event.PAUSES, Event.ENDS],
        [*WAYS["begins"], Event.ENDS, Event.BEGINS],
    ],
)
def test_what_is_left_out_or_comes_too_early_is_refused(events):
    after(events[:-1])
    with pytest.raises(IllegalEventError):
        after(events)


@given(st.lists(st.sampled_from(Event)))
def test_training_is_reached_only_after_a_state_is_in_place(events):
    seen = []
    phase = Phase.PLANNING
    for event in events:
        try:
            phase = advance(phase, event)
        except IllegalEventError:
            continue
        seen.append(event)
        if phase is Phase.TRAINING and Event.LOADS not in seen:
            assert seen[:2] == RESTORED
            assert Event.REACHED in seen
