"""An interrupt that a library swallows leads to a restart, not to the end of the process."""

import threading
import time
from datetime import timedelta

import pytest
from nvidia_resiliency_ext.inprocess.monitor_thread import MonitorThread, RankShouldRestart

from megatron_moevement.integrations.nvrx.interrupts import mend_interrupts


class State:
    rank = 0


class Store:
    """Says at once that a rank is interrupted."""

    def wait_for_interrupted(self, timeout):
        del timeout

    def lock_interruption_records(self):
        pass

    def get_interruption_records(self):
        return []


class Watchdog:
    def pause_and_synchronize(self):
        pass

    def resume(self):
        pass


@pytest.fixture(autouse=True)
def mended(monkeypatch):
    monkeypatch.setattr(MonitorThread, "maybe_join", MonitorThread.maybe_join)
    mend_interrupts()


def interrupting():
    """Returns a thread that interrupts this one."""
    zero = timedelta(0)
    return MonitorThread(
        State(), Store(), None, zero, Watchdog(), timedelta(minutes=1), zero, threading.Lock(), True
    )


def run_until_interrupted(thread):
    thread.start()
    while True:
        time.sleep(0.01)


def test_a_swallowed_interrupt_is_raised_when_the_function_has_failed():
    thread = interrupting()
    with pytest.raises(RankShouldRestart):  # what a library would swallow
        run_until_interrupted(thread)
    with pytest.raises(RankShouldRestart):
        thread.maybe_join()
    thread.shutdown()


def fail(thread):
    thread.start()
    thread.maybe_join()


def test_an_interrupt_that_nobody_swallowed_is_raised_as_before():
    thread = interrupting()
    with pytest.raises(RankShouldRestart):
        fail(thread)
    thread.shutdown()
