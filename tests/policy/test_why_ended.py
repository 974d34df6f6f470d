# SPDX-License-Identifier: Apache-2.0
"""Reasons in short: of each rank the one that tells most, and few bytes whatever the ranks."""

import json

from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.outcome.why_ended import (
    MOST_RUNS,
    reason_of_each,
    reasons_in_short,
)

ORDER = ("killed", "silent", "failed")
REASONS = st.lists(st.tuples(st.integers(0, 40), st.sampled_from(ORDER)))


def test_ranks_that_follow_each_other_are_named_together():
    reasons = [(rank, "failed") for rank in reversed(range(8192))]
    assert reasons_in_short([*reasons, (5, "killed")], ORDER) == [
        ["killed", [[5, 5]]],
        ["failed", [[0, 4], [6, 8191]]],
    ]


@given(REASONS)
def test_of_each_rank_the_first_of_the_order_counts(reasons):
    wanted = {}
    for name in reversed(ORDER):
        wanted |= {rank: name for rank, own in reasons if own == name}
    short = json.loads(json.dumps(reasons_in_short(reasons, ORDER)))
    assert reason_of_each(short) == wanted


def test_reasons_have_few_bytes_however_the_ranks_take_turns():
    turns = [(rank, ORDER[rank % 2]) for rank in range(16384)]
    short = reasons_in_short([*turns, (9, "killed")], ORDER)
    assert len(json.dumps(short)) < 18 * MOST_RUNS
    assert reason_of_each(short) == dict.fromkeys([*range(0, 2 * MOST_RUNS + 1, 2), 9], "killed")


def test_what_is_left_out_tells_least():
    turns = [(rank, ORDER[rank % 2 + 1]) for rank in range(10)]
    assert reasons_in_short([*turns, (9, "killed")], ORDER, most_runs=4) == [
        ["killed", [[9, 9]]],
        ["silent", [[0, 0], [2, 2], [4, 4]]],
    ]
