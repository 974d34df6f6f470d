"""An interrupt reaches a host that waits for its device, and what has ended is not waited for."""

import threading

import pytest

from megatron_moevement.runtime.interrupts import host_wait
from megatron_moevement.runtime.interrupts.host_wait import await_on_host
from megatron_moevement.runtime.interrupts.thread_start import raise_in_thread

pytestmark = pytest.mark.timeout(30)


class Interrupted(BaseException):
    """What a restart raises in the training thread."""


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


@pytest.fixture
def polling(monkeypatch):
    monkeypatch.setattr(host_wait, "_is_polling", True)


def in_a_thread(collective):
    ended = []

    def wait():
        try:
            await_on_host(collective)
        except Interrupted:
            ended.append("interrupted")
        else:
            ended.append("read")

    thread = threading.Thread(target=wait)
    thread.start()
    for _ in range(3):
        collective.looks.acquire()
    return thread, ended


@pytest.mark.usefixtures("polling")
def test_an_interrupt_ends_the_wait_for_a_collective_that_never_ends():
    collective = Collective()
    thread, ended = in_a_thread(collective)
    raise_in_thread(thread.ident, Interrupted)
    thread.join()
    assert ended == ["interrupted"]


@pytest.mark.usefixtures("polling")
def test_a_collective_that_ends_is_read():
    collective = Collective()
    thread, ended = in_a_thread(collective)
    collective.ended.release()
    thread.join()
    assert ended == ["read"]


def test_a_rank_outside_of_a_group_waits_for_nothing():
    await_on_host(None)
