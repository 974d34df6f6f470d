# SPDX-License-Identifier: Apache-2.0
"""An interrupt reaches who waits in native code, and what was given up leaves no trace later."""

import sys
import threading

import pytest

from megatron_moevement.runtime.interrupts import interruptible_wait
from megatron_moevement.runtime.interrupts.interruptible_wait import (
    _Waiter,
    count_connecting,
    interruptibly,
)
from megatron_moevement.runtime.interrupts.thread_start import raise_in_thread
from tests.harness.interrupted import Interrupted

pytestmark = [
    pytest.mark.timeout(30),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


class Operation:
    """A receive that ends when it is told to."""

    def __init__(self, failure=None):
        self.begun, self.ended = threading.Event(), threading.Event()
        self._failure = failure

    def wait(self):
        self.begun.set()
        self.ended.wait()
        if self._failure is not None:
            raise self._failure
        return True


class Training(threading.Thread):
    """Waits for an operation, as the training thread does."""

    def __init__(self, wait, operation):
        super().__init__()
        self._wait = wait
        self.ending = None
        self.start()
        operation.begun.wait()

    def run(self):
        try:
            self.ending = self._wait()
        except (Interrupted, RuntimeError) as error:
            self.ending = type(error)

    def interrupt(self):
        raise_in_thread(self.ident, Interrupted)
        self.join()
        assert self.ending is Interrupted


class SlowList(list):
    """Idle waiters; the first thread that adds itself stops there, seen by all others."""

    def __init__(self):
        super().__init__()
        self.added, self.may_go_on = threading.Event(), threading.Event()

    def append(self, waiter):
        super().append(waiter)
        self.added.set()
        self.may_go_on.wait()


@pytest.fixture
def waiter(monkeypatch):
    monkeypatch.setattr(interruptible_wait, "_wait_blocking", Operation.wait)
    made = _Waiter()
    (thread,) = [each for each in threading.enumerate() if each.name == "point-to-point"]
    yield made
    monkeypatch.setattr(interruptible_wait, "_wait_blocking", sys.exit)
    made._work.put((0, None))
    thread.join()


@pytest.mark.parametrize("failure", [None, RuntimeError("Connection closed by peer")])
def test_the_end_of_a_wait_that_was_given_up_is_not_that_of_the_next_one(
    monkeypatch, waiter, failure
):
    idle = SlowList()
    monkeypatch.setattr(interruptible_wait, "_idle", idle)
    given_up, wanted = Operation(failure), Operation()
    Training(lambda: waiter.wait(given_up), given_up).interrupt()
    given_up.ended.set()
    idle.added.wait()
    wanted.begun.set()  # the waiter is still busy with the end of the other one
    next_waiter = idle.pop()
    training = Training(lambda: next_waiter.wait(wanted), wanted)
    idle.may_go_on.set()
    training.join(0.3)
    assert training.is_alive()
    wanted.ended.set()
    training.join()
    assert training.ending is True


def test_a_failure_reaches_who_waits(monkeypatch, waiter):
    monkeypatch.setattr(interruptible_wait, "_idle", [])
    operation = Operation(RuntimeError("Connection closed by peer"))
    training = Training(lambda: waiter.wait(operation), operation)
    operation.ended.set()
    training.join()
    assert training.ending is RuntimeError
    assert interruptible_wait._idle == [waiter]


def test_an_interrupt_reaches_who_connects_and_the_connecting_thread_goes_on_alone():
    operation = Operation()
    Training(lambda: interruptibly(operation.wait), operation).interrupt()
    (thread,) = [each for each in threading.enumerate() if each.name == "connecting"]
    assert count_connecting() == 1
    operation.ended.set()
    thread.join()
    assert count_connecting() == 0


@pytest.mark.parametrize(
    ("failure", "ending"), [(None, True), (RuntimeError("Connection refused"), RuntimeError)]
)
def test_what_connecting_leads_to_reaches_who_waits(failure, ending):
    operation = Operation(failure)
    training = Training(lambda: interruptibly(operation.wait), operation)
    operation.ended.set()
    training.join()
    assert training.ending is ending
