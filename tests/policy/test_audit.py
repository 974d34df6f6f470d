# SPDX-License-Identifier: Apache-2.0
"""Which slots are compared, and what of them differs."""

import pytest

from megatron_moevement.policy.copies.audit import Difference, audit, is_audited
from megatron_moevement.policy.job.ranks import LogicalRank

RANKS = [LogicalRank(dp=number) for number in range(3)]


@pytest.mark.parametrize("interval", [1, 2, 3, 4, 5, 7, 12])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5])
def test_each_interval_has_an_audit_and_all_slots_come_in_turn(interval, window):
    steps = range(1, interval * window * 3 + window)
    slots = [
        step % window
        for step in steps
        if is_audited(step, step % window, interval=interval, window=window)
    ]
    assert set(slots) == set(range(window))
    assert len(slots) <= len(steps) / interval + 1
    if interval >= window:
        assert len(slots) >= 3 * window - 1


def test_replicas_that_are_the_same_do_not_differ():
    found = audit({rank: {"layers.0.gate": "a", "head": "b"} for rank in RANKS})
    assert (found.operators, found.differences) == (2, ())


def test_the_odd_one_of_three_is_named():
    captured = {rank: {"layers.0.gate": "ab"[rank.dp == 1]} for rank in RANKS}
    everybody = tuple(map(str, RANKS))
    assert audit(captured).differences == (
        Difference("layers.0.gate", (str(RANKS[1]),), everybody),
    )


def test_of_two_both_are_named():
    captured = {rank: {"head": str(rank.dp)} for rank in RANKS[:2]}
    (found,) = audit(captured).differences
    assert found.odd == found.ranks == tuple(map(str, RANKS[:2]))


def test_what_one_rank_holds_alone_is_not_compared():
    captured = {rank: {f"layers.0.experts.{rank.dp}": "a"} for rank in RANKS}
    assert audit(captured).operators == 0
    parts = {LogicalRank(tp=tp): {"head": str(tp)} for tp in range(2)}
    assert audit(parts).operators == 0
