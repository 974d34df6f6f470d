# SPDX-License-Identifier: Apache-2.0
"""Roll-forward: what ranks that step together can go on from when they were cut at any moment."""

import dataclasses

import pytest

from megatron_moevement.policy.facts.facts import (
    Condition,
    InconsistentFactsError,
    LiveState,
    ProcessFacts,
)
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.recovery.plan import RollForward
from megatron_moevement.policy.recovery.rollforward import Progress, find_progress, newest_committed
from megatron_moevement.policy.window.schedule import Window

TARGET = 13
WINDOW = Window(8, 3)
RANKS = [LogicalRank(dp=number) for number in range(3)]


def stage(*lives, committed=TARGET):
    """Returns ranks of one stage; `committed` is theirs, or one step for each."""
    steps = [committed] * len(lives) if isinstance(committed, int) else committed
    return [
        ProcessFacts(number, "node", RANKS[number], step, live)
        for number, (live, step) in enumerate(zip(lives, steps, strict=True))
    ]


def dense(step, finished=None):
    return LiveState(Condition.DENSE, step, finished=finished)


def partial(step, finished=None, window=WINDOW):
    return LiveState(Condition.PARTIAL, step, window, finished)


def test_ranks_at_the_target_go_on_from_it():
    assert find_progress(stage(dense(13), dense(13)), TARGET) == Progress(13, None)


def test_a_rank_that_did_not_apply_the_target_rolls_forward():
    members = stage(dense(13), dense(12, finished=13), committed=[13, 12])
    assert find_progress(members, TARGET) == Progress(13, None, (RollForward(RANKS[1], 13),))


def test_a_whole_stage_rolls_forward_to_what_another_stage_committed():
    members = stage(dense(12, finished=13), dense(12, finished=13), committed=12)
    rolling = (RollForward(RANKS[0], 13), RollForward(RANKS[1], 13))
    assert find_progress(members, TARGET) == Progress(13, None, rolling)


@pytest.mark.parametrize("live", [dense(12), dense(12, finished=12), dense(11, finished=12)])
def test_a_rank_in_training_that_can_not_follow_broke_the_barrier(live):
    members = stage(dense(13), live, committed=[13, live.step])
    with pytest.raises(InconsistentFactsError, match=r"pp0\.dp1"):
        find_progress(members, TARGET)


@pytest.mark.parametrize("condition", [Condition.TORN, Condition.ABSENT])
def test_one_lost_state_is_the_loss_of_the_stage(condition):
    assert find_progress(stage(dense(13), LiveState(condition, 13)), TARGET) is None


def test_a_stage_in_the_middle_of_a_replay_goes_on_where_it_is():
    assert find_progress(stage(partial(9), partial(9)), TARGET) == Progress(9, WINDOW)
    assert find_progress(stage(dense(11), dense(11)), TARGET) == Progress(11, None)


def test_in_a_replay_a_rank_with_finished_gradients_rolls_forward_too():
    members = stage(partial(9), partial(8, finished=9))
    assert find_progress(members, TARGET) == Progress(9, WINDOW, (RollForward(RANKS[1], 9),))


def test_a_finished_step_that_no_rank_of_a_replaying_stage_applied_is_replayed_again():
    members = stage(partial(8, finished=9), partial(8, finished=9))
    assert find_progress(members, TARGET) == Progress(8, WINDOW)


def test_at_the_last_slot_it_does_not_matter_who_has_loaded_it():
    members = stage(dense(10), partial(9, finished=10))
    assert find_progress(members, TARGET) == Progress(10, WINDOW, (RollForward(RANKS[1], 10),))
    assert find_progress(stage(dense(10), partial(10)), TARGET) == Progress(10, WINDOW)


def test_a_window_that_rolling_forward_completes_is_not_open_any_more():
    members = stage(dense(11), partial(10, finished=11))
    assert find_progress(members, TARGET) == Progress(11, None, (RollForward(RANKS[1], 11),))


def test_a_rank_that_gave_its_state_up_for_a_slot_leaves_the_stage_with_nothing():
    assert find_progress(stage(dense(13), partial(8)), TARGET) is None
    assert find_progress(stage(partial(9), partial(8)), TARGET) is None
    assert find_progress(stage(dense(8), partial(8)), TARGET) is None
    assert find_progress(stage(partial(8, window=Window(6, 3)), partial(8)), TARGET) is None


def test_a_state_serves_the_window_it_converts_and_every_one_that_began_before_it_if_dense():
    assert Progress(9, WINDOW).serves(WINDOW)
    assert not Progress(9, WINDOW).serves(Window(5, 3))
    assert Progress(9, None).serves(WINDOW)
    assert not Progress(7, None).serves(WINDOW)


def test_the_target_is_the_newest_committed_step():
    assert newest_committed(stage(dense(12), dense(12), committed=[12, 13])) == 13
    assert newest_committed([]) is None


def test_what_was_left_to_a_new_process_is_no_step_that_the_others_agreed_on():
    first, second = stage(dense(12), LiveState(Condition.ABSENT), committed=[12, 13])
    found = dataclasses.replace(second, is_new=True)
    assert newest_committed([first, found]) == 12
    assert newest_committed([found]) == 13
    assert newest_committed([dataclasses.replace(first, committed=None), found]) == 13
