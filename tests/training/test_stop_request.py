"""Ctrl-C reaches the training thread once, wherever it is."""

import gc
import signal
import time

import pytest

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


def test_one_that_was_dropped_does_not_disturb_what_cleans_up():
    stop = StopSources(None)
    with stop.listening():
        Garbage()
        gc.collect()
        stop.hold()
        time.sleep(0.2)
    assert stop.interrupted
