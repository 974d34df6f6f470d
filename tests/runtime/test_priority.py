# SPDX-License-Identifier: Apache-2.0
"""Threads beside training leave cores to it; training's own thread keeps its priority."""

import ctypes
import os
import platform
import struct
import threading
from datetime import timedelta

import pytest

from megatron_moevement.runtime.capture.background import Background
from megatron_moevement.runtime.priority import BACKGROUND_NICE, BACKGROUND_SLICE, lower_priority

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}
LINUX = tuple(int(number) for number in platform.release().split("-")[0].split(".")[:2])


def own_nice():
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def own_slice():
    """Returns the slices of the calling thread as the kernel has them; `struct sched_attr`."""
    attributes = struct.Struct("=IIQiIQQQ")
    found = ctypes.create_string_buffer(attributes.size)
    call = ctypes.c_long(SCHED_GETATTR[platform.machine()])
    assert not ctypes.CDLL(None).syscall(call, 0, found, attributes.size, 0)
    return timedelta(microseconds=attributes.unpack(found.raw)[5] / 1000)


def nice_after(*steps, look=own_nice):
    """Returns the priority of a thread that takes steps, after each."""
    seen = []

    def run():
        for step in steps:
            step()
            seen.append(look())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return seen


def test_the_thread_alone_that_asks_for_it_takes_what_is_left():
    before = own_nice()
    assert nice_after(lower_priority, lower_priority) == [max(before, BACKGROUND_NICE)] * 2
    assert own_nice() == before


@pytest.mark.skipif(LINUX < (6, 12), reason="gives no slices that are asked for")
def test_its_slices_are_longer_than_those_of_others():
    before = own_slice()
    assert nice_after(lower_priority, look=own_slice) == [BACKGROUND_SLICE]
    assert own_slice() == before < BACKGROUND_SLICE


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
