# SPDX-License-Identifier: Apache-2.0
"""Persistence: acknowledgements of a rank, and the window that the whole job has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.copies.commit import agreed_coverage, coverage_vote
from megatron_moevement.policy.copies.persistence import Acknowledgements, SlotKey
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import Window

RANKS = [LogicalRank(dp=number) for number in range(3)]
WINDOWS = [Window(start, 2) for start in (0, 2, 4)]


def slot(window, number):
    return SlotKey(RANKS[0], window, number)


def landed(*slots, holders=(1, 2)):
    state = Acknowledgements()
    for key in slots:
        state = state.landed(key, holders)
    return state


def acknowledge(state, *slots, holders=(1, 2)):
    for key in slots:
        for process in holders:
            state = state.acknowledged(key, process)
    return state


SLOTS = [slot(window, number) for window in WINDOWS for number in range(2)]


def test_a_slot_holds_the_state_of_its_step():
    assert slot(WINDOWS[1], 1).step == 3


def test_a_window_is_complete_with_the_last_acknowledgement_of_its_last_slot():
    state = acknowledge(landed(*SLOTS[:2]), SLOTS[0])
    state = state.acknowledged(SLOTS[1], 1)
    assert not state.is_complete(WINDOWS[0])
    assert state.newest_complete() is None
    state = state.acknowledged(SLOTS[1], 2)
    assert state.is_complete(WINDOWS[0])
    assert state.newest_complete() == WINDOWS[0]


def test_a_window_whose_last_slot_has_not_landed_is_not_complete():
    assert not acknowledge(landed(SLOTS[0]), SLOTS[0]).is_complete(WINDOWS[0])


def test_with_no_replicas_landing_is_enough():
    assert landed(*SLOTS[:2], holders=()).is_complete(WINDOWS[0])


def test_a_complete_window_does_not_hide_an_older_one_that_is_not():
    state = acknowledge(landed(*SLOTS[:4]), SLOTS[0], SLOTS[2], SLOTS[3])
    assert state.is_complete(WINDOWS[1])
    assert state.newest_complete() is None
    assert acknowledge(state, SLOTS[1]).newest_complete() == WINDOWS[1]


def test_late_and_foreign_acknowledgements_are_ignored():
    state = landed(SLOTS[0])
    assert state.acknowledged(SLOTS[1], 1) is state
    assert state.acknowledged(SLOTS[0], 9) is state


def test_a_slot_captured_again_needs_its_acknowledgements_again():
    state = acknowledge(landed(*SLOTS[:2]), *SLOTS[:2]).landed(SLOTS[1], (1, 2))
    assert not state.is_complete(WINDOWS[0])


def test_a_successor_owes_what_its_forerunner_had_confirmed():
    state = acknowledge(landed(*SLOTS[:2]), *SLOTS[:2]).holder_replaced(2, 5, SLOTS[:2])
    assert not state.is_complete(WINDOWS[0])
    assert acknowledge(state, *SLOTS[:2], holders=(5,)).is_complete(WINDOWS[0])


def test_without_a_successor_the_others_are_enough():
    state = acknowledge(landed(*SLOTS[:2]), *SLOTS[:2], holders=(1,))
    assert not state.is_complete(WINDOWS[0])
    state = state.holder_excused(2)
    assert state.is_complete(WINDOWS[0])
    assert (state.fewest_copies(), state.owed_copies()) == (1, 2)


def test_a_slot_is_not_complete_without_any_copy_for_as_long_as_there_is_a_holder():
    state = landed(*SLOTS[:2], holders=(2,)).holder_excused(2)
    assert not state.is_complete(WINDOWS[0])
    assert state.newest_complete() is None
    state = landed(*SLOTS[:2]).holder_excused(1).holder_excused(2)
    assert not state.is_complete(WINDOWS[0])
    state = acknowledge(state, SLOTS[0], holders=(1,))
    assert not state.holder_excused(1).is_complete(WINDOWS[0])


def test_a_holder_that_confirms_a_copy_again_is_waited_for():
    state = acknowledge(landed(*SLOTS[:2]), *SLOTS[:2], holders=(1,)).holder_excused(2)
    state = acknowledge(state, SLOTS[0], holders=(2,))
    assert state.excused == frozenset()
    assert not state.is_complete(WINDOWS[0])
    assert acknowledge(state, SLOTS[1], holders=(2,)).is_complete(WINDOWS[0])


def test_who_takes_the_place_of_an_excused_holder_is_waited_for():
    state = acknowledge(landed(*SLOTS[:2]), *SLOTS[:2], holders=(1,)).holder_excused(2)
    state = state.holder_replaced(2, 5, SLOTS[:2])
    assert not state.is_complete(WINDOWS[0])
    assert acknowledge(state, *SLOTS[:2], holders=(5,)).is_complete(WINDOWS[0])


def test_the_fewest_copies_are_those_of_the_worst_slot_of_the_newer_windows():
    state = acknowledge(landed(*SLOTS[:2]), *SLOTS[:2], holders=(1,)).holder_excused(2)
    state = acknowledge(state.landed(SLOTS[2], (1, 2)).landed(SLOTS[3], (1, 2)), SLOTS[3])
    assert (state.newest_complete(), state.fewest_copies()) == (None, 0)
    state = acknowledge(state, *SLOTS[:3])
    assert (state.newest_complete(), state.fewest_copies()) == (WINDOWS[1], 2)
    worse = landed(*SLOTS[:2], holders=(1,)).landed(SLOTS[2], (1, 2)).landed(SLOTS[3], (1, 2))
    worse = acknowledge(worse, *SLOTS[:4])
    assert worse.fewest_copies() == 1
    assert worse.fewest_copies(WINDOWS[0]) == 2
    assert worse.fewest_copies(WINDOWS[1]) == 2


def test_who_keeps_a_slot_already_counts_as_a_copy():
    state = landed().landed(SLOTS[0], (2,), (1,)).landed(SLOTS[1], (), (1, 2))
    assert state.has_second_holder(WINDOWS[0])
    assert acknowledge(state, SLOTS[0], holders=(2,)).fewest_copies() == 2


def test_a_second_holder_is_enough_to_train_on():
    state = landed(*SLOTS[:2], holders=(1, 2))
    assert not state.has_second_holder(WINDOWS[0])
    state = acknowledge(state, SLOTS[0], holders=(1,))
    assert not state.has_second_holder(WINDOWS[0])
    state = acknowledge(state, SLOTS[1], holders=(2,))
    assert state.has_second_holder(WINDOWS[0])
    assert not state.is_complete(WINDOWS[0])
    assert state.owed_copies() == 2


def test_without_holders_a_slot_has_what_it_can_have_when_it_has_landed():
    assert not landed(SLOTS[0], holders=()).has_second_holder(WINDOWS[0])
    assert landed(*SLOTS[:2], holders=()).has_second_holder(WINDOWS[0])


def test_a_second_holder_of_a_window_that_was_dropped_is_not_waited_for():
    state = acknowledge(landed(*SLOTS[:2]).landed(SLOTS[2], (1, 2)), SLOTS[2])
    assert not state.has_second_holder(WINDOWS[0])
    assert state.dropped_before(WINDOWS[1]).has_second_holder(WINDOWS[0])
    assert not Acknowledgements().has_second_holder(WINDOWS[0])


def test_dropped_windows_are_forgotten():
    state = landed(*SLOTS).dropped_before(WINDOWS[1])
    assert {key.window for key in state.owing} == set(WINDOWS[1:])


def agreed(*reported):
    """Returns what the barrier tells all ranks of what each has reported."""
    votes = [coverage_vote(*each) for each in reported]
    return agreed_coverage([max(column) for column in zip(*votes, strict=True)])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=4))
def test_a_window_is_persisted_when_the_slowest_rank_has_it(reported):
    starts, copies = zip(*reported, strict=True)
    assert agreed(*reported) == (min(starts), min(copies))


@pytest.mark.parametrize("missing", range(3))
def test_a_rank_that_reports_nothing_holds_everybody_back(missing):
    reported = [(-1, 0) if rank == missing else (4, 2) for rank in range(3)]
    assert agreed(*reported) == (-1, 0)
