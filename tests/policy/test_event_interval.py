# SPDX-License-Identifier: Apache-2.0
"""How many steps an event stands for bounds what a large job writes, and how late it is seen."""

import pytest

from megatron_moevement.policy.accounting.event_interval import event_interval

BYTES = {1: 560, 10: 60}
"""Of one process a step, by the interval: benchmarks/event_cost.py."""
STEPS_A_DAY = 24 * 60 * 60


@pytest.mark.parametrize(
    ("ranks", "interval"), [(1, 1), (2, 1), (64, 1), (65, 10), (1024, 10), (100_000, 10)]
)
def test_every_step_has_an_event_up_to_64_ranks(ranks, interval):
    assert event_interval(ranks) == interval


@pytest.mark.parametrize("ranks", [1, 64, 65, 1024])
def test_a_job_writes_a_few_gigabytes_a_day(ranks):
    assert ranks * BYTES[event_interval(ranks)] * STEPS_A_DAY < 6e9
