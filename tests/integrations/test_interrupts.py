# SPDX-License-Identifier: Apache-2.0
"""An interrupt that a library swallows leads to a restart, not to the end of the process."""

import contextlib
import os
import queue
import signal
import socket
import threading
import time
from datetime import timedelta

import pytest
from nvidia_resiliency_ext.inprocess import monitor_thread
from nvidia_resiliency_ext.inprocess.monitor_thread import MonitorThread, RankShouldRestart

from megatron_moevement.backends.backend import Collectives
from megatron_moevement.cli.stores import serve_store
from megatron_moevement.integrations.nvrx.interrupts import mend_interrupts
from megatron_moevement.integrations.nvrx.restarter import Restartable, run_restartable
from megatron_moevement.policy.outcome.futility import Futility
from megatron_moevement.runtime.coordination.generation import Interruption
from megatron_moevement.runtime.interrupts.thread_start import (
    raise_in_thread,
    starting,
    uninterrupted,
)
from megatron_moevement.settings.launch import Launch
from megatron_moevement.settings.restart import InProcessRestart
from megatron_moevement.settings.secret import Secret
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


class StrikingLock:
    """Has another thread interrupt the one that takes it, once."""

    def __init__(self):
        self.lock = threading.Lock()
        self.acquire, self.release = self.lock.acquire, self.lock.release
        self.thread = None

    def __enter__(self):
        self.lock.acquire()
        if threading.get_ident() == self.thread:
            self.thread = None
            interrupter = threading.Thread(target=strike, args=(threading.get_ident(),))
            threading.Thread(target=interrupter.start).start()
            for _ in range(50):
                time.sleep(0.01)  # an interrupt arrives here

    def __exit__(self, *_):
        self.lock.release()


def call_until_interrupted(function):
    while True:
        function()


def ping_and_be_interrupted(generation, _):
    """Trains in a generation of which an interrupt meets a message to the monitor."""
    messages = generation.ping.__self__.monitor_process.msg_queue
    lock = StrikingLock()
    messages._notempty = threading.Condition(lock)
    lock.thread = threading.get_ident()
    with pytest.raises(Interrupted):
        call_until_interrupted(generation.ping)
    assert lock.lock.acquire(timeout=5)
    lock.lock.release()
    print("the queue is free")


def train_restartably():
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    store, control = (each.getsockname() for each in listeners)
    servers = [serve_store(each, "127.0.0.1") for each in listeners]
    secret = Secret(b"the secret of this job, and of no other")
    launch = Launch(0, 0, 1, store=store, control_store=control, secret=secret)
    what = Restartable(
        ping_and_be_interrupted,
        *(lambda _: None, lambda: None, Futility, lambda: None),
        *(Collectives.GLOO, Interruption(), "here"),
    )
    run_restartable(what, InProcessRestart(inprocess_restart=True), launch)
    del servers


@pytest.mark.distributed
def test_an_interrupt_leaves_the_messages_to_the_monitor_unlocked(megatron_fork_server):
    result = megatron_fork_server.run(train_restartably, world_size=1, timeout_s=60).check()
    assert "the queue is free" in result.ranks[0].stdout


def test_what_was_raised_before_arrives_before_the_function_begins():
    here, held, ran = threading.get_ident(), threading.Event(), []

    def interrupt():
        with starting:
            held.set()
            time.sleep(0.3)  # in which this thread begins to wait for the lock
            strike(here)

    function = uninterrupted(lambda: ran.append(True))
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    held.wait()
    with pytest.raises(Interrupted):
        function()
    assert not ran
    interrupter.join()


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
