# SPDX-License-Identifier: Apache-2.0
"""What led to a W outlasts restarts, whichever process chooses after them."""

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.watching.measurements import Measured
from megatron_moevement.policy.watching.window_choice import Reason, WindowChoice, ends_trial

FULL_BYTES, COMPUTE_BYTES = 12_000_000, 2_000_000
SLOTS = {w: FULL_BYTES // w + COMPUTE_BYTES * (w - 1) // w for w in range(1, 9)}
DELAY_S = 0.1


class Training:
    """A job whose iterations W = 1 lengthens by a share, as its passes wait for cores."""

    def __init__(self, window, cost, noise=0.0):
        self.window, self.decision = window, None
        self.choice = None
        self.cost, self.noise = cost, noise
        self.random = random.Random(f"{window} {cost} {noise}")
        self.windows = []

    def restart(self):
        """Loses all that is in memory of who chooses."""
        self.choice = None

    def measure(self):
        """Trains until the next edge at which ranks tell what they measured, and chooses."""
        costly_s = self.cost * (self.window == 1)
        iteration_s = (1 + costly_s) * (1 + self.random.uniform(-self.noise, self.noise))
        measured = Measured(1e12, 1e12, iteration_s, 0.0, delay_s=DELAY_S + costly_s)
        former = WindowChoice.under(self.window, None, self.choice, self.decision)
        self.choice = former.after(measured, SLOTS, replicas=2)
        decision = self.choice.decision
        if self.choice.window != self.window or ends_trial(self.decision, decision):
            self.window, self.decision = self.choice.window, decision
        self.windows.append(self.window)


def history(first, cost, restarts, count=90, noise=0.0):
    """Returns a job after so many measurements, with a restart before some of them."""
    job = Training(first, cost, noise)
    for number in range(count):
        if number in restarts:
            job.restart()
        job.measure()
    return job


RESTARTS = st.sets(st.integers(0, 60), max_size=20)


@given(st.integers(2, 8), RESTARTS)
def test_a_smaller_w_that_costs_is_given_up_whenever_restarts_come(first, restarts):
    windows = history(first, 0.15, restarts).windows
    tried = [w for w, before in zip(windows, [first, *windows], strict=False) if w < before]
    assert windows[-1] > 1
    assert len(tried) <= 2  # the second one comes after eight times as many measurements
    assert windows.count(1) <= 3 * (2 + len(restarts))


@given(st.integers(2, 8), RESTARTS)
def test_a_smaller_w_that_costs_nothing_is_kept_whenever_restarts_come(first, restarts):
    windows = history(first, 0.0, restarts, count=120).windows
    assert windows == sorted(windows, reverse=True)
    assert windows[-1] == 1


def test_a_trial_that_is_over_does_not_begin_again():
    """Iterations that have become longer since then are no reason to give W up."""
    job = history(4, 0.0, {})
    assert job.decision.trial is None
    job.restart()
    job.cost = 0.15
    for _ in range(20):
        job.measure()
    assert job.windows[3:] == [1] * 107


def test_restarts_that_come_one_after_the_other_end_no_trial_without_a_verdict():
    for cost, noise in ((0.15, 0.0), (0.15, 0.08)):
        for every in range(4, 9):
            windows = history(4, cost, set(range(3, 60, every)), noise=noise).windows
            assert windows[-1] > 1


def test_a_smaller_w_is_tried_at_last_however_often_it_has_cost():
    job = history(4, 0.15, {}, count=2_000)
    assert max(count for count in runs_of(job.windows)) <= 192 + 12
    job.cost = 0.0
    for _ in range(220):
        job.measure()
    assert job.windows[-1] == 1
    assert job.decision.patience == 3


def test_a_trial_that_makes_no_iterations_longer_is_put_off_for_twice_as_long_alone():
    """Threads beside training take CPU time, and passes wait for cores: iterations stay."""
    choice = WindowChoice(4)
    for _ in range(3):
        choice = choice.after(Measured(1e12, 1e12, 1.0, 0.0, 0.0, DELAY_S), SLOTS, replicas=2)
    assert choice.trial is not None
    for _ in range(3):
        choice = choice.after(Measured(1e12, 1e12, 1.0, 0.0, 0.05, 2 * DELAY_S), SLOTS, replicas=2)
    assert (choice.reason, choice.patience) == (Reason.COSTS, 6)


def runs_of(windows):
    """Returns for how many measurements each W stayed."""
    return [len(list(run)) for _, run in itertools.groupby(windows)]
