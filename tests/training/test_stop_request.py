# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C reaches the training thread once, wherever it is."""

import contextlib
import gc
import os
import signal
import threading
import time

import pytest

from megatron_moevement.runtime.coordination.commit_barrier import StopRequest
from megatron_moevement.runtime.interrupts.thread_start import raise_in_thread
from megatron_moevement.training.stop_request import StopSources

pytestmark = pytest.mark.timeout(20)


class Garbage:
    """A cycle whose finalizer runs when Ctrl-C is pressed; Python drops what it raises."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        signal.raise_signal(signal.SIGINT)


def wait():
    while True:
        time.sleep(0.01)


def test_an_interrupt_that_a_finalizer_drops_comes_again():
    stop = StopSources(None)
    with stop.listening():
        Garbage()
        gc.collect()
        with pytest.raises(KeyboardInterrupt):
            wait()
        assert stop.interrupted


def test_the_second_one_disturbs_nobody():
    with StopSources(None).listening():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


def test_whatever_took_its_place_it_comes_again_when_asked_for():
    stop = StopSources(None)
    with stop.listening():
        stop.check()
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            stop.check()


class LateError(BaseException):
    """What another thread raises in the main one, as the monitor of a restart does."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_whose_handler_another_exception_cuts_short_is_known(number):
    main_thread = threading.main_thread().ident

    def strike():
        raise_in_thread(main_thread, LateError)  # it waits in C, so both arrive together
        signal.pthread_kill(main_thread, number)

    stop = StopSources(None)
    with stop.listening():
        assert stop.request() is StopRequest.NONE
        threading.Timer(0.1, strike).start()
        with pytest.raises(LateError):
            wait()
        assert stop.request() is StopRequest.SIGNAL
        assert stop.interrupted == (number == signal.SIGINT)
        with pytest.raises(KeyboardInterrupt) if stop.interrupted else contextlib.nullcontext():
            stop.check()


def test_a_signal_of_a_forked_child_is_not_its_parents():
    stop = StopSources(None)
    with stop.listening():
        child = os.fork()
        if not child:
            signal.raise_signal(signal.SIGTERM)
            os._exit(0 if stop.request() is StopRequest.NONE else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert stop.request() is StopRequest.NONE


def test_nothing_cuts_short_what_cleans_up():
    main_thread, worked = threading.main_thread().ident, []

    def work():
        for step in range(100):
            raise_in_thread(main_thread, LateError)
            signal.pthread_kill(main_thread, signal.SIGINT)
            time.sleep(0.002)
            worked.append(step)
        time.sleep(0.1)  # the last one arrives while this is waited for

    stop = StopSources(None)
    with stop.listening():
        Garbage()
        gc.collect()
        stop.clean_up(work)
    assert worked == list(range(100))
