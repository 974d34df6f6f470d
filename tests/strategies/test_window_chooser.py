# SPDX-License-Identifier: Apache-2.0
"""The chooser brings measurements to the policy, and tells every change with its numbers."""

import dataclasses

import pytest

from megatron_moevement.policy.watching.measurements import Measured
from megatron_moevement.runtime.observation.events import EventName, Events
from megatron_moevement.strategies.moevement.schedules.window_chooser import WindowChooser

SLOTS = {1: 1200, 2: 700, 4: 400, 8: 300}
CALM = Measured(10_000.0, 10_000.0, 1.0, 0.0)
STALLED = Measured(1000.0, 500.0, 1.0, 0.25)
TOO_SLOW = Measured(1000.0, 100.0, 1.0, 3.0)


class Told(Events):
    def __init__(self):
        self.all = []

    def emit(self, event, iteration, **fields):
        self.all.append((event, iteration, fields))


@pytest.fixture
def chooser():
    told, said = Told(), []
    chooser = WindowChooser(lambda: SLOTS, 2, told, said.append)
    chooser.events, chooser.said = told.all, said
    return chooser


def chosen(chooser, step, window, measured):
    chooser.note(step, window, measured)
    return chooser.choose()


def test_nothing_is_chosen_without_a_measurement(chooser):
    assert not chooser.has_news
    assert chooser.choose() is None
    chooser.note(8, 4, STALLED)
    chooser.forget()
    assert chooser.choose() is None


def test_a_change_is_told_with_the_numbers_behind_it(chooser):
    assert chosen(chooser, 8, 2, STALLED) == 4
    assert chooser.events == [
        (
            EventName.WINDOW_CHOSEN,
            8,
            {
                "former": 2,
                "window": 4,
                "reason": "stalls",
                "budget_bytes": 500,
                "former_slot_bytes": 700,
                "slot_bytes": 400,
                **dataclasses.asdict(STALLED),
            },
        )
    ]
    (line,) = chooser.said
    assert line.startswith("step 8: W = 4 is proposed instead of 2 (stalls)")


def test_slack_is_counted_anew_under_another_w(chooser):
    windows = [(4, None), (4, None), (2, None), (2, None), (2, 1)]
    for step, (window, expected) in enumerate(windows):
        assert chosen(chooser, step, window, CALM) == expected


def test_a_choice_that_came_into_force_goes_on(chooser):
    for _ in range(2):
        assert chosen(chooser, 8, 4, CALM) is None
    assert chosen(chooser, 8, 4, CALM) == 1
    assert chosen(chooser, 20, 1, STALLED) == 4
    calm = [chosen(chooser, step, 4, CALM) for step in range(6)]
    assert calm == [None] * 5 + [1]


def test_a_link_too_slow_for_any_w_is_told_once_with_the_numbers(chooser):
    assert [chosen(chooser, step, 8, TOO_SLOW) for step in (8, 16)] == [None, None]
    (line,) = chooser.said
    assert line == (
        "no W up to 8 hides its slots behind an iteration: the smallest of 0.0003 MB is too large, "
        "an iteration of 1 s, with stalls of 3 s, hides 0.0001 MB at 0.001 MB/s to the host and "
        "0.0001 MB/s to the slowest holder; training waits for the rest: lower "
        "--moevement-replicas, or use a faster --moevement-replication-interface"
    )
