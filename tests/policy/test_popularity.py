# SPDX-License-Identifier: Apache-2.0
"""What is known of how often experts are activated, and when it asks for another order."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.job.operators import OperatorId, OperatorKind
from megatron_moevement.policy.window.ordering import Ordering
from megatron_moevement.policy.window.popularity import (
    CountedSteps,
    Popularity,
    must_reorder,
    room_for,
    steps_to_reduce,
)
from megatron_moevement.policy.window.timetable import Timetable, TimetableEntry

COUNTS = st.lists(st.integers(0, 2**62), min_size=1, max_size=40)
COUNTED = [ordering for ordering in Ordering if ordering is not Ordering.INDEX]


@pytest.mark.parametrize(
    ("former", "newest", "wanted"),
    [
        ([], [5, 5], True),
        ([], [0, 0], False),
        ([100] * 8, [200] * 8, False),
        ([100] * 8, [109, 91, *[100] * 6], False),
        ([100] * 8, [110, 90, *[100] * 6], True),
        ([100] * 8, [150, 51, *[100] * 6], True),
        ([100] * 8, [180, *[100] * 7], False),
        ([0, 0, 10, 10], [1, 0, 10, 10], True),
    ],
)
def test_a_change_by_a_tenth_of_a_quarter_of_the_experts_asks_for_an_order(former, newest, wanted):
    assert must_reorder(former, newest) is wanted


@given(COUNTS, st.integers(1, 1000))
def test_more_tokens_alike_ask_for_none(counts, times):
    assert not must_reorder(counts, [times * count for count in counts]) or not sum(counts)


@given(st.lists(COUNTS, max_size=5), st.sampled_from(COUNTED), st.floats(0, 0.999))
def test_what_is_known_reads_back_and_has_room(windows, ordering, decay):
    known = Popularity(ordering)
    experts = max(map(len, windows), default=1)
    for counts in windows:
        known = known.after_window((counts * experts)[:experts], decay)
    text = json.dumps(known.document(), separators=(",", ":"))
    assert Popularity.of_document(json.loads(text)) == known
    assert len(text) <= room_for(experts)


@given(
    st.lists(st.lists(st.integers(0, 10**6), min_size=6, max_size=6), min_size=1, max_size=4),
    st.integers(2, 8),
    st.randoms(use_true_random=False),
)
def test_however_tokens_are_spread_over_ranks_all_come_to_the_same_order(windows, ranks, draw):
    def reduced(counts):
        parts = [[0] * len(counts) for _ in range(ranks)]
        for expert, count in enumerate(counts):
            left = count
            for part in parts[:-1]:
                part[expert] = draw.randint(0, left)
                left -= part[expert]
            parts[-1][expert] = left
        draw.shuffle(parts)
        return [sum(own) for own in zip(*parts, strict=True)]

    for ordering in COUNTED:
        alone = together = Popularity(ordering)
        for counts in windows:
            alone = alone.after_window(counts, 0.5)
            together = together.after_window(reduced(counts), 0.5)
        assert alone == together


def test_a_window_that_was_not_counted_changes_nothing():
    known = Popularity(Ordering.HARD).after_window([1, 2], 0.5)
    assert known.after_window(None, 0.5) is known


def test_the_order_asked_for_stays_until_much_has_changed():
    first = Popularity(Ordering.HARD).after_window([100, 200, 300, 400], 0.5)
    assert first.ordered_by == first.scores == (100, 200, 300, 400)
    second = first.after_window([105, 195, 300, 400], 0.5)
    assert (second.scores, second.ordered_by) == ((105, 195, 300, 400), first.ordered_by)
    third = second.after_window([400, 300, 200, 100], 0.5)
    assert third.ordered_by == third.scores == (400, 300, 200, 100)


def test_an_average_keeps_a_part_of_what_was():
    known = Popularity(Ordering.DECAYED).after_window([100, 0], 0.75).after_window([0, 100], 0.75)
    assert known.scores == (75_000, 25_000)


def test_experts_are_told_by_layer_and_number():
    experts = [OperatorId(OperatorKind.EXPERT, layer, n) for layer in range(2) for n in range(2)]
    known = Popularity(Ordering.HARD).after_window([1, 2, 3, 4], 0.5)
    operators = [OperatorId(OperatorKind.GATE, 0), *experts]
    random.Random(1).shuffle(operators)
    assert known.of_experts(operators) == dict(zip(experts, (1, 2, 3, 4), strict=True))
    assert known.of_experts(experts[:3]) == {}
    assert Popularity(Ordering.HARD).of_experts(experts) == {}


def test_the_first_step_of_a_window_reduces_the_steps_of_the_one_before():
    entries = (TimetableEntry(0, 0, 2, "one"), TimetableEntry(1, 6, 3, "other"))
    timetable = Timetable(entries)
    reduced = {step: steps_to_reduce(timetable, step) for step in range(1, 13)}
    assert {step: found for step, found in reduced.items() if found is not None} == {
        2: range(1, 2),
        4: range(2, 4),
        6: range(4, 6),
        9: range(6, 9),
        12: range(9, 12),
    }
    assert steps_to_reduce(Timetable(entries[1:], 1), 6) == range(0)


def test_windows_of_one_slot_reduce_nothing():
    """Nor does the first window after them: what they counted is no order of its slots."""
    entries = (
        TimetableEntry(0, 0, 2, "one"),
        TimetableEntry(1, 4, 1, "smallest"),
        TimetableEntry(2, 7, 2, "other"),
    )
    reduced = {step: steps_to_reduce(Timetable(entries), step) for step in range(1, 12)}
    assert {step: found for step, found in reduced.items() if found is not None} == {
        2: range(1, 2),
        7: range(0),
        9: range(7, 9),
        11: range(9, 11),
    }


def test_steps_in_a_row_are_counted_until_another_window_begins():
    counted = CountedSteps()
    for step, begins_window, steps in [
        (1, False, range(1, 2)),
        (2, True, range(2, 3)),
        (3, False, range(2, 4)),
        (7, False, range(7, 8)),
        (8, False, range(7, 9)),
        (8, False, range(8, 9)),
        (9, True, range(9, 10)),
    ]:
        counted = counted.with_step(step, begins_window=begins_window)
        assert counted.are(steps)
        assert not counted.are(range(steps.start - 1, steps.stop))
        assert not counted.are(range(steps.start, steps.stop + 1))
