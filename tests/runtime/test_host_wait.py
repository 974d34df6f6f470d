# SPDX-License-Identifier: Apache-2.0
"""An interrupt reaches a host that waits for its device, and what has ended is not waited for."""

import threading

import pytest

from megatron_moevement.runtime.interrupts.host_wait import _awaited, await_on_host
from megatron_moevement.runtime.interrupts.thread_start import raise_in_thread
from tests.harness.interrupted import Interrupted

pytestmark = pytest.mark.timeout(30)


class Collective:
    """A collective on a device: waiting for it blocks in native code until it has ended."""

    def __init__(self):
        self.ended, self.looks = threading.Lock(), threading.Semaphore(0)
        self.ended.acquire()

    def is_completed(self):
        self.looks.release()
        return not self.ended.locked()

    def wait(self):
        with self.ended:
            return True


def in_a_thread(collective, await_end=await_on_host):
    ended = []

    def wait():
        try:
            await_end(collective)
        except Interrupted:
            ended.append("interrupted")
        else:
            ended.append("read")

    thread = threading.Thread(target=wait)
    thread.start()
    for _ in range(3):
        collective.looks.acquire()
    return thread, ended


def test_an_interrupt_ends_the_wait_for_a_collective_that_never_ends():
    collective = Collective()
    thread, ended = in_a_thread(collective)
    raise_in_thread(thread.ident, Interrupted)
    thread.join()
    assert ended == ["interrupted"]


def test_a_collective_that_ends_is_read():
    collective = Collective()
    thread, ended = in_a_thread(collective)
    collective.ended.release()
    thread.join()
    assert ended == ["read"]


def test_a_rank_outside_of_a_group_waits_for_nothing():
    await_on_host(None)


def gathering(collective, group=None, async_op=False):
    """Begins a collective as torch does: it is waited for, unless who calls it will."""
    if async_op:
        return collective
    collective.wait()
    return None


def test_an_interrupt_ends_a_call_that_waits_for_its_own_end():
    thread, ended = in_a_thread(Collective(), _awaited(gathering))
    raise_in_thread(thread.ident, Interrupted)
    thread.join()
    assert ended == ["interrupted"]


@pytest.mark.parametrize(("args", "kwargs"), [((None, True), {}), ((), {"async_op": True})])
def test_a_call_that_was_not_to_wait_does_not(args, kwargs):
    collective = Collective()
    assert _awaited(gathering)(collective, *args, **kwargs) is collective
