# SPDX-License-Identifier: Apache-2.0
"""The chooser brings measurements to the policy, and tells every change with its numbers."""

import dataclasses

import pytest

from megatron_moevement.policy.watching.measurements import Measured
from megatron_moevement.policy.watching.schedule_maker import Noted, SlotSizes
from megatron_moevement.policy.window.timetable import Trial, WindowDecision
from megatron_moevement.runtime.observation.events import EventName, Events
from megatron_moevement.runtime.observation.notices import Notices
from megatron_moevement.strategies.moevement.schedules.window_chooser import WindowChooser

SIZES = {
    1: SlotSizes(1200, 1200),
    2: SlotSizes(700, 1300),
    4: SlotSizes(400, 1500),
    8: SlotSizes(300, 1900),
}
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
    return new_chooser()


def new_chooser():
    told, said, warned = Told(), [], []
    chooser = WindowChooser(lambda: SIZES, 2, told, Notices(said.append, warned.append))
    chooser.events, chooser.said, chooser.warned = told.all, said, warned
    return chooser


def chosen(chooser, step, window, measured, used=None, standing=None):
    chooser.note(Noted(step, window, measured))
    found = chooser.choose(window, used, standing)
    return None if found == (window, used) else found


def test_nothing_is_chosen_without_a_measurement(chooser):
    assert not chooser.has_news
    assert chooser.choose(4, 2) == (4, 2)
    chooser.note(Noted(8, 4, STALLED))
    chooser.forget()
    assert chooser.choose(4, 2) == (4, 2)


def test_a_change_is_told_with_the_numbers_behind_it(chooser):
    assert chosen(chooser, 8, 2, STALLED) == (4, None)
    assert chooser.events == [
        (
            EventName.WINDOW_CHOSEN,
            8,
            {
                "former": 2,
                "window": 4,
                "used": None,
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
    windows = [(4, None), (4, None), (2, None), (2, None), (2, (1, None))]
    for step, (window, expected) in enumerate(windows):
        assert chosen(chooser, step, window, CALM) == expected


def test_a_choice_that_came_into_force_goes_on(chooser):
    for _ in range(2):
        assert chosen(chooser, 8, 4, CALM) is None
    assert chosen(chooser, 8, 4, CALM) == (1, None)
    assert chosen(chooser, 20, 1, STALLED) == (4, None)
    calm = [chosen(chooser, step, 4, CALM) for step in range(6)]
    assert calm == [None] * 5 + [(1, None)]


def test_what_is_measured_on_the_way_to_a_smaller_w_does_not_count(chooser):
    for _ in range(2):
        assert chosen(chooser, 8, 8, CALM) is None
    assert chosen(chooser, 8, 8, CALM) == (1, None)
    assert chosen(chooser, 16, 4, STALLED) == (1, None)
    assert chosen(chooser, 24, 2, STALLED) == (1, None)
    costly = dataclasses.replace(CALM, iteration_s=1.5)  # of an iteration with W = 8
    for _ in range(2):
        assert chosen(chooser, 32, 1, costly) is None
    assert chosen(chooser, 32, 1, costly) == (8, None)


@pytest.mark.parametrize(("window", "used"), [(8, None), (2, None)])
def test_w_is_chosen_anew_where_the_one_in_force_does_not_lie_on_the_way(chooser, window, used):
    for _ in range(3):
        chosen(chooser, 8, 4, CALM)
    assert chosen(chooser, 12, 2, CALM) == (1, None)
    assert chosen(chooser, 16, window, CALM, used) is None


def test_a_trial_goes_on_wherever_it_is_chosen_after_a_restart(chooser):
    for step in range(3):
        chosen(chooser, step, 4, CALM)
    decision = chooser.decision(None)
    assert decision == WindowDecision(1, None, 3, 4, Trial(4, 400, 1.0, 0.0, None))
    costly = dataclasses.replace(CALM, iteration_s=1.5)
    on_its_way, tried = new_chooser(), new_chooser()
    assert chosen(on_its_way, 8, 2, costly, standing=decision) == (1, None)
    found = [chosen(tried, step, 1, costly, standing=decision) for step in range(3)]
    assert found == [None, None, (8, None)]
    assert tried.decision(decision) == WindowDecision(8, None, 6, 0)


def test_of_what_is_not_among_the_limits_of_a_launch_the_patience_stays(chooser):
    decisions = [
        WindowDecision(3, None, 24, 8),
        WindowDecision(8, 3, 24, 8),
        WindowDecision(1, None, 24, 8, Trial(3, 400, 1.0, 0.0)),
    ]
    for decision in decisions:
        assert chooser.decision(decision) is decision
        assert new_chooser().choose(4, None, decision) == (4, None)
        other = new_chooser()
        assert chosen(other, 4, 4, CALM, standing=decision) is None
        assert other.decision(decision) == WindowDecision(4, None, 24, 0)


def test_what_threads_beside_training_take_is_a_reason_and_part_of_the_line(chooser):
    contended = dataclasses.replace(CALM, contention_s=0.125)
    for _ in range(2):
        assert chosen(chooser, 8, 2, contended) is None
    assert chosen(chooser, 8, 2, contended) == (8, None)
    (line,) = chooser.said
    assert line.startswith("step 8: W = 8 is proposed instead of 2 (costs)")
    assert "with stalls of 0 s and 0.125 s that threads beside training took, hides" in line


TOO_LARGE = (
    "no W up to 8 hides its slots behind an iteration: the smallest of 0.0003 MB is too large, "
    "an iteration of 1 s, with stalls of 3 s, hides {hides} MB at {host} MB/s to the host and "
    "{hides} MB/s to the slowest holder"
)
ADVICE = "lower --moevement-replicas, or use a faster --moevement-replication-interface"


@pytest.mark.parametrize(
    ("measured", "follows", "told"),
    [
        (
            Measured(1000.0, 100.0, 1.0, 3.0),
            (8, 2),
            TOO_LARGE.format(hides="0.0001", host="0.001")
            + "; from now on 2 of 8 steps are captured, 0.0013 MB in all, as much as 13 iterations "
            "hide; training waits for the rest: give --moevement-max-window 13, " + ADVICE,
        ),
        (
            Measured(5000.0, 200.0, 1.0, 3.0),
            (8, 1),
            TOO_LARGE.format(hides="0.0002", host="0.005")
            + "; from now on 1 of 8 steps are captured, 0.0012 MB in all, as much as 6 iterations "
            "hide",
        ),
        (
            Measured(200.0, 200.0, 1.0, 3.0),
            (8, None),
            TOO_LARGE.format(hides="0.0002", host="0.0002")
            + "; training waits for the rest: "
            + ADVICE,
        ),
    ],
)
def test_a_link_too_slow_for_any_w_is_told_once_with_the_numbers(chooser, measured, follows, told):
    assert chosen(chooser, 8, 4, measured) == follows
    window, used = follows
    assert chosen(chooser, 16, window, measured, used) is None
    assert chooser.warned == [told]
    assert all(line.startswith("step") for line in chooser.said)
