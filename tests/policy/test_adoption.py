# SPDX-License-Identifier: Apache-2.0
"""Which of the stores that were left a process goes on with, and when they may be removed."""

import dataclasses

import pytest

from megatron_moevement.policy.copies.left_stores import (
    NOTHING,
    adopts_in,
    age_of,
    may_forget_left,
    of_no_use,
    share_of_flushed,
)
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import Window


@dataclasses.dataclass(frozen=True)
class Left:
    rollbacks: int
    committed: int
    rank: LogicalRank | None


def test_a_later_era_is_newer_than_any_step():
    rank = LogicalRank(pp=1)
    assert age_of(Left(1, 3, rank), rank) > age_of(Left(0, 9, rank), rank)
    assert age_of(Left(0, 9, rank), rank) > age_of(Left(0, 8, rank), rank) > NOTHING


@pytest.mark.parametrize("state", [None, Left(5, 9, LogicalRank(pp=2)), Left(5, 9, None)])
def test_what_is_of_another_rank_is_nothing(state):
    assert age_of(state, LogicalRank(pp=1)) == NOTHING


def test_what_lies_before_a_rollback_that_is_known_of_is_nothing():
    rank = LogicalRank(pp=1)
    assert age_of(Left(1, 3, rank), rank, rollbacks=1) > NOTHING
    assert age_of(Left(0, 9, rank), rank, rollbacks=1) == NOTHING


def test_what_others_left_is_looked_for_in_any_generation():
    assert all(adopts_in(generation, is_refused=False) for generation in range(3))
    assert adopts_in(0, is_refused=True)
    assert not adopts_in(1, is_refused=True)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_what_was_flushed_is_brought_back_once_by_its_rank_or_by_some_rank(stages):
    ranks = [LogicalRank(pp=stage) for stage in range(stages)]
    flushed = {7: None, 3: ranks[-1], 11: None, 4: None, 5: ranks[0], 8: ranks[0]}
    shares = {rank: share_of_flushed(flushed, rank, ranks) for rank in ranks}
    assert sorted(number for share in shares.values() for number in share) == sorted(flushed)
    assert {5, 8} <= set(shares[ranks[0]])
    assert 3 in shares[ranks[-1]]


def test_what_was_left_stays_until_a_window_has_its_copies_and_the_recovery_is_over():
    window = Window(4, 2, 0)
    assert may_forget_left(window, is_returning=False)
    assert not may_forget_left(window, is_returning=True)
    assert not may_forget_left(None, is_returning=False)


def test_what_a_process_leaves_that_has_just_died_is_of_use():
    assert of_no_use([3, 1, 7], {1, 3, 5}) == (1, 3)
