# SPDX-License-Identifier: Apache-2.0
"""Waiting for another thread, interrupted at any instruction, never stops that thread."""

import contextlib
import sys
import threading
import time
from datetime import timedelta

import pytest

from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.capture.background import Background
from megatron_moevement.runtime.interrupts.interrupt_safe_event import InterruptSafeEvent
from megatron_moevement.runtime.peers.copy_account import CopyAccount
from tests.harness.interrupted import Interrupted

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


def test_what_was_told_is_seen_once():
    news = InterruptSafeEvent()
    assert not news.wait(timedelta(0))
    news.tell()
    news.tell()
    assert news.wait(timedelta(0))
    assert not news.wait(timedelta(0))


def test_news_end_a_wait():
    news = InterruptSafeEvent()
    telling = threading.Timer(0.05, news.tell)
    telling.start()
    assert news.wait(timedelta(seconds=30))
    telling.join()


def interrupted_at(number, function):
    """Calls a function in a thread and interrupts it at a point where an interrupt may come.

    CPython raises exceptions of other threads where a function begins and where one in C has ended:
    these are what a profiler is told of.

    Returns:
        Whether it came so far.
    """
    was_interrupted = False

    def interrupt(_, event, __):
        nonlocal number, was_interrupted
        if event in {"call", "c_return"}:
            number -= 1
            if number < 0:
                sys.setprofile(None)
                was_interrupted = True
                raise Interrupted

    def run():
        sys.setprofile(interrupt)
        with contextlib.suppress(Interrupted):
            function()
        sys.setprofile(None)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    return was_interrupted


def all_points(function):
    """Returns how many points a function was interrupted at, one after the other."""
    return next(number for number in range(10_000) if not interrupted_at(number, function))


def test_background_work_goes_on_wherever_who_waits_for_it_is_interrupted():
    background = Background("background", lambda _: time.sleep(0.001), lambda error: error)

    def train():
        background.hand_over(0)
        background.await_landed()

    assert all_points(train) > 10
    background.await_landed()
    background.close()


def test_acknowledgements_are_noted_wherever_who_waits_for_them_is_interrupted():
    account = CopyAccount()
    key = SlotKey(LogicalRank(), Window(0, 1), 0)
    is_over = False

    def note():
        while not is_over:
            account.note_acknowledged(key, 1)
            time.sleep(0.0005)

    def train():
        account.update(lambda known: known.landed(key, [1]))
        while any(account.acknowledgements.owing.values()):
            account.await_change(timedelta(seconds=0.01))

    noting = threading.Thread(target=note, daemon=True)
    noting.start()
    assert all_points(train) > 10
    is_over = True
    noting.join(20)
    assert not noting.is_alive()
