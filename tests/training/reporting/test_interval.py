# SPDX-License-Identifier: Apache-2.0
"""Means and counts since the last line are those of Megatron-LM."""

import dataclasses
import math
from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.training.reporting.interval import Interval, StepReport

STEP = StepReport(
    iteration=1,
    consumed_samples=8,
    duration=timedelta(seconds=1),
    loss=2.0,
    auxiliary_losses={},
    learning_rate=0.1,
    loss_scale=1.0,
    grad_norm=1.0,
    is_skipped=False,
)


def _interval(*steps: StepReport) -> Interval:
    interval = Interval()
    for step in steps:
        interval.add(step)
    return interval


def _step(iteration: int, **changes: object) -> StepReport:
    return dataclasses.replace(STEP, iteration=iteration, **changes)


def test_losses_are_means_over_the_steps_since_the_last_line():
    interval = _interval(_step(1, loss=1.0), _step(2, loss=4.0))
    assert interval.mean_losses() == {"lm loss": 2.5}
    interval.clear()
    interval.add(_step(3, loss=7.0))
    assert interval.mean_losses() == {"lm loss": 7.0}


def test_skipped_steps_count_for_the_time_but_not_for_the_loss():
    interval = _interval(
        _step(1, loss=1.0, duration=timedelta(seconds=1)),
        _step(2, loss=9.0, duration=timedelta(seconds=3), is_skipped=True, grad_norm=None),
    )
    assert interval.mean_losses() == {"lm loss": 1.0}
    assert interval.elapsed_per_iteration == timedelta(seconds=2)
    assert (interval.skipped, interval.nans) == (1, 0)


def test_a_skipped_step_without_a_finite_loss_is_a_nan_iteration():
    interval = _interval(
        _step(1, loss=math.inf, is_skipped=True), _step(2, loss=math.nan, is_skipped=True)
    )
    assert (interval.skipped, interval.nans) == (2, 2)
    assert interval.mean_losses() == {"lm loss": 0.0}


def test_a_step_that_was_applied_is_no_nan_iteration_whatever_its_loss():
    interval = _interval(_step(1, loss=math.nan))
    assert (interval.skipped, interval.nans) == (0, 0)


def test_auxiliary_losses_are_means_over_the_steps_that_have_them():
    interval = _interval(
        _step(1), _step(2, auxiliary_losses={"z_loss": 3.0}), _step(3, auxiliary_losses={})
    )
    assert interval.mean_losses() == {"lm loss": 2.0, "z_loss": 3.0}


@given(st.lists(st.integers(1, 5), min_size=1), st.randoms())
def test_steps_reported_again_change_nothing(iterations, random):
    steps = [_step(k, loss=float(k), duration=timedelta(seconds=k)) for k in iterations]
    once = _interval(*steps)
    random.shuffle(steps)
    twice = _interval(*steps, *steps)
    assert once.mean_losses() == twice.mean_losses()
    assert once.elapsed_per_iteration == twice.elapsed_per_iteration
    assert once.newest == twice.newest
    assert once.newest.iteration == max(iterations)
