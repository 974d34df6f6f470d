# SPDX-License-Identifier: Apache-2.0
"""Bandwidth: the budget of a slot."""

from datetime import timedelta

import pytest

from megatron_moevement.policy.window.bandwidth import PathBandwidth

SECOND = timedelta(seconds=1)


@pytest.mark.parametrize(
    ("path", "budget"),
    [
        (PathBandwidth(100, 1000, 2), 200),
        (PathBandwidth(100, 60, 2), 60),
        (PathBandwidth(100, 60, 0), 200),
        (PathBandwidth(100, 1000, 2, log_bytes=50), 150),
        (PathBandwidth(100, 1000, 2, log_bytes=500), 0),
    ],
)
def test_the_slower_leg_bounds_the_slot(path, budget):
    assert path.slot_budget_bytes(2 * SECOND) == budget


@pytest.mark.parametrize("values", [(0, 1, 1), (1, 0, 1), (1, 1, -1), (1, 1, 1, -1)])
def test_impossible_paths_are_refused(values):
    with pytest.raises(ValueError, match="must"):
        PathBandwidth(*values)
