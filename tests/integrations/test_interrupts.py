"""An interrupt that a library swallows leads to a restart, not to the end of the process."""

import contextlib
import os
import queue
import signal
import threading
import time
from datetime import timedelta

import pytest
from nvidia_resiliency_ext.inprocess import monitor_thread
from nvidia_resiliency_ext.inprocess.monitor_thread import MonitorThread, RankShouldRestart

from megatron_moevement.integrations.nvrx.interrupts import mend_interrupts
from megatron_moevement.runtime.interrupts.thread_start import raise_in_thread, starting
from tests.harness.interrupted import Interrupted


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
    monkeypatch.setattr(monitor_thread, "async_raise", monitor_thread.async_raise)
    monkeypatch.setattr(threading.Thread, "start", threading.Thread.start)
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


def restart(thread):
    monitor_thread.async_raise(thread, Interrupted)


def strike(thread):
    raise_in_thread(thread, Interrupted)


@pytest.mark.parametrize("raises", [restart, strike])
def test_an_interrupt_waits_for_a_thread_that_starts(monkeypatch, raises):
    here, begin = threading.get_ident(), threading._start_new_thread
    raised, ran, early = queue.SimpleQueue(), queue.SimpleQueue(), []

    def interrupt():
        raises(here)
        raised.put(True)

    def start_new_thread(function, arguments):
        """Interrupts where a new thread still has the identifier of this one."""
        begin(interrupt, ())
        with contextlib.suppress(queue.Empty):
            early.append(raised.get(timeout=0.5))
        return begin(function, arguments)

    monkeypatch.setattr(threading, "_start_new_thread", start_new_thread)
    with pytest.raises(Interrupted):
        run_until_interrupted(threading.Thread(target=ran.put, args=(True,)))
    assert not early
    assert raised.get(timeout=10)
    assert ran.get(timeout=10)


def test_a_child_that_is_forked_while_a_thread_starts_starts_threads():
    held, over = threading.Event(), threading.Event()

    def hold():
        with starting:
            held.set()
            over.wait(0.3)  # in which this process begins to fork

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = os.fork()
    if not child:
        signal.alarm(10)
        threading.Thread(target=int).start()
        os._exit(0)
    over.set()
    assert os.waitpid(child, 0)[1] == 0
    holder.join()
