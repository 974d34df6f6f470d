# SPDX-License-Identifier: Apache-2.0
"""Curves of a report: bounded, the same in any order, and with what is highest and where."""

import random

from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.report.curve import POINTS, Curve

VALUES = st.lists(
    st.tuples(st.integers(1, 5000), st.integers(-1000, 1000), st.integers(0, 7)), min_size=1
)


def curve_of(values):
    curve = Curve()
    for step, value, rank in values:
        curve.add(step, value, rank)
    return curve.document()


@given(VALUES, st.randoms(use_true_random=False))
def test_the_order_of_values_does_not_matter(values, shuffled):
    mixed = list(values)
    shuffled.shuffle(mixed)
    assert curve_of(values) == curve_of(mixed)


def test_few_steps_have_a_point_each():
    found = curve_of([(1, 2.0, 0), (1, 4.0, 1), (2, 3.0, 0), (2, 3.0, 1)])
    assert found == {
        "stride": 1,
        "steps": [1, 2],
        "mean": [3, 3],
        "low": [2, 3],
        "high": [4, 3],
        "rank": [1, 0],
    }


def test_ranks_that_agree_have_no_band():
    assert curve_of([(1, 0.5, 0), (1, 0.5, 1)]) == {"stride": 1, "steps": [1], "mean": [0.5]}


def test_many_steps_share_points_and_no_peak_is_lost():
    draw = random.Random(3)
    values = [(step, draw.random(), step % 4) for step in range(1, 9001)]
    values[4321] = (4322, 99.0, 6)
    found = curve_of(values)
    assert found["stride"] == 8
    assert len(found["steps"]) <= POINTS
    peak = max(found["high"])
    place = found["high"].index(peak)
    assert (peak, found["rank"][place]) == (99, 6)
    assert found["steps"][place] <= 4322 < found["steps"][place] + 8
    means = sum(value for _, value, _ in values) / len(values)
    assert abs(sum(found["mean"]) / len(found["mean"]) - means) < 0.01


def test_what_is_no_number_is_left_out():
    assert (
        curve_of([(1, None, 0), (2, "nan", 0), (3, float("inf"), 0), (4, float("nan"), 0)]) is None
    )
