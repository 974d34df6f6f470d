# SPDX-License-Identifier: Apache-2.0
"""Threads beside training leave cores to it; training's own thread keeps its priority."""

import os
import threading

import pytest

from megatron_moevement.runtime.capture.background import Background
from megatron_moevement.runtime.priority import BACKGROUND_NICE, lower_priority


def own_nice():
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def nice_after(*steps):
    """Returns the priority of a thread that takes steps, after each."""
    seen = []

    def run():
        for step in steps:
            step()
            seen.append(own_nice())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return seen


def test_the_thread_alone_that_asks_for_it_takes_what_is_left():
    before = own_nice()
    assert nice_after(lower_priority, lower_priority) == [max(before, BACKGROUND_NICE)] * 2
    assert own_nice() == before


def test_a_priority_that_is_lower_stays():
    def lowest():
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)

    assert nice_after(lowest, lower_priority) == [19, 19]


@pytest.mark.parametrize("pieces", [1, 3])
def test_what_is_handed_over_is_done_at_low_priority(pieces):
    seen = []
    with Background("test", lambda _: seen.append(own_nice()), lambda error: error) as background:
        for number in range(pieces):
            background.hand_over(number)
        background.await_landed()
    assert seen == [max(own_nice(), BACKGROUND_NICE)] * pieces
    assert own_nice() < BACKGROUND_NICE
