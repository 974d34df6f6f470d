# SPDX-License-Identifier: Apache-2.0
"""Timetables: one schedule for each step, changed at window edges alone, by agreement."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.job.operators import Inventory, Operator, OperatorId, OperatorKind
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import Window, WindowSchedule
from megatron_moevement.policy.window.timetable import (
    MAX_ENTRIES,
    Proposal,
    Timetable,
    TimetableEntry,
    TwoSchedulesError,
    UnknownScheduleError,
    WindowDecision,
    agreed_version,
    may_propose,
    newest_timetable,
    schedule_vote,
)

EXPERTS = [OperatorId(OperatorKind.EXPERT, 0, number) for number in range(3)]
INVENTORY = Inventory({LogicalRank(): tuple(Operator(expert, 12, 2) for expert in EXPERTS)})


def schedule_of(window, shift=0):
    slots = {expert: (number + shift) % window for number, expert in enumerate(EXPERTS)}
    return WindowSchedule(INVENTORY, window, slots)


@st.composite
def timetables(draw):
    """Draws what a job has come to that agreed on some schedules."""
    timetable = Timetable.begun(schedule_of(draw(st.integers(1, 4))), draw(st.integers(0, 9)))
    for _ in range(draw(st.integers(0, 4))):
        step = timetable.newest.first_step + draw(st.integers(0, 9))
        version = timetable.newest.schedule_version + 1
        timetable = timetable.adopted(version, schedule_of(draw(st.integers(1, 4))), step)
    return timetable


@given(timetables(), st.integers(0, 60))
def test_windows_follow_each_other_without_gap_whatever_schedules_change(timetable, offset):
    step = timetable.first_step + offset
    window, entry = timetable.window_of(step), timetable.at(step)
    assert window.start <= step <= window.last
    assert window.step_of(timetable.slot_of(step)) == step
    assert (window.size, window.schedule_version) == (entry.window, entry.schedule_version)
    following = timetable.window_of(window.last + 1)
    assert following.start == window.last + 1
    assert timetable.last_before_persisted(window) == following.last
    assert timetable.has(window)
    assert timetable.of(window) == entry


def test_the_decision_for_a_w_stays_until_another_schedule_follows():
    decided = WindowDecision(2, None, 24, 4)
    first = Timetable.begun(schedule_of(4), 0).adopted(1, schedule_of(2), 3, decided)
    assert first.newest.decision == decided
    assert first.restarted(9).newest.decision == decided
    second = first.adopted(2, schedule_of(2, 1), 4)
    assert [entry.decision for entry in second.entries] == [None] * 3
    assert newest_timetable([second, first]) == second
    assert newest_timetable([first]) == first


@given(timetables(), st.integers(0, 9), st.integers(1, 4))
def test_a_schedule_is_in_force_from_the_first_edge_after_the_agreement(timetable, offset, window):
    step = timetable.newest.first_step + offset
    version = timetable.newest.schedule_version + 1
    later = timetable.adopted(version, schedule_of(window), step)
    edge = later.newest.first_step
    assert step < edge <= step + timetable.newest.window
    for earlier in range(timetable.first_step, edge):
        assert later.at(earlier) == timetable.at(earlier)
    assert timetable.window_of(edge).start == edge
    assert later.window_of(edge) == Window(edge, window, version)


def test_a_step_before_all_that_is_known_has_no_window():
    timetable = Timetable.begun(schedule_of(2), 4)
    with pytest.raises(UnknownScheduleError, match="step 3 lies before the first known, 4"):
        timetable.window_of(3)
    assert not timetable.has(Window(2, 2))


@pytest.mark.parametrize("window", [Window(5, 2), Window(4, 3), Window(4, 2, 1)])
def test_a_window_of_another_schedule_is_not_read_by_this_one(window):
    timetable = Timetable.begun(schedule_of(2), 4)
    assert not timetable.has(window)
    with pytest.raises(UnknownScheduleError, match="is none of"):
        timetable.of(window)


def test_one_change_at_a_time():
    timetable = Timetable.begun(schedule_of(3), 0).adopted(1, schedule_of(2), 4)
    assert timetable.newest.first_step == 6
    assert not may_propose(timetable, 5, 0)
    assert may_propose(timetable, 6, 0)
    with pytest.raises(ValueError, match="not in force at step 5"):
        timetable.adopted(2, schedule_of(1), 5)
    for version in range(2, MAX_ENTRIES):
        timetable = timetable.adopted(version, schedule_of(1), 10 + 3 * version)
    assert not may_propose(timetable, 50, 0)
    assert may_propose(timetable, 50, 40)


@pytest.mark.parametrize("version", [0, 1, 3])
def test_a_version_is_the_next_and_no_other(version):
    timetable = Timetable.begun(schedule_of(2), 0).restarted(0)
    with pytest.raises(TwoSchedulesError, match="would follow 1"):
        timetable.adopted(version, schedule_of(3), 4)


@given(timetables(), st.integers(0, 40))
def test_what_captured_something_from_a_step_on_stays_known(timetable, offset):
    step = timetable.first_step + offset
    kept = timetable.known_from(step)
    for later in range(step, step + 30):
        assert kept.at(later) == timetable.at(later)
    assert kept.first_version == timetable.first_version
    assert len(kept.entries) == 1 or kept.entries[1].first_step > step


def test_windows_that_begin_anew_have_a_version_of_their_own():
    timetable = Timetable.begun(schedule_of(3), 0).adopted(1, schedule_of(2), 4)
    anew = timetable.restarted(5)
    assert (anew.first_version, anew.first_step, len(anew.entries)) == (2, 5, 1)
    assert (anew.newest.window, anew.newest.digest) == (2, timetable.newest.digest)


@pytest.mark.parametrize(
    "entries",
    [
        (),
        (TimetableEntry(0, 0, 2, "a"), TimetableEntry(0, 2, 2, "a")),
        (TimetableEntry(0, 2, 2, "a"), TimetableEntry(1, 2, 2, "b")),
        (TimetableEntry(0, 0, 2, "a"), TimetableEntry(1, 3, 2, "b")),
        (TimetableEntry(0, 0, 0, "a"),),
    ],
)
def test_what_can_not_have_happened_is_refused(entries):
    with pytest.raises(ValueError, match=r"no timetable|come after|within|at least one slot"):
        Timetable(entries)
    with pytest.raises(ValueError, match="no timetable"):
        Timetable((TimetableEntry(0, 0, 2, "a"),), first_version=1)


def test_two_schedules_with_one_version_are_refused():
    begun = Timetable.begun(schedule_of(3), 0)
    one = begun.adopted(1, schedule_of(2), 4)
    assert newest_timetable([begun, one, begun]) == one
    assert newest_timetable([]) is None
    for other in (begun.adopted(1, schedule_of(1), 4), begun.adopted(1, schedule_of(2), 7)):
        with pytest.raises(TwoSchedulesError, match="schedule 1 is"):
            newest_timetable([one, other])


def barrier(*votes):
    return agreed_version(tuple(max(column) for column in zip(*votes, strict=True)))


def test_a_schedule_is_agreed_on_once_every_rank_has_it():
    timetable = Timetable.begun(schedule_of(3), 0)
    known = schedule_vote(timetable, Proposal(1, schedule_of(2).digest))
    lacking = schedule_vote(timetable, None)
    assert barrier(lacking, lacking) == 0
    assert barrier(known, lacking) is barrier(lacking, known, known) is None
    assert barrier(known, known) == 1


def test_a_proposal_that_was_adopted_is_none_any_more():
    timetable = Timetable.begun(schedule_of(3), 0).adopted(1, schedule_of(2), 4)
    stale = schedule_vote(timetable, Proposal(1, schedule_of(2).digest))
    assert barrier(stale, schedule_vote(timetable, None)) == 1


def test_ranks_that_go_by_different_schedules_or_edges_are_told():
    begun = Timetable.begun(schedule_of(3), 0)
    proposed = [Proposal(1, schedule_of(2, shift).digest) for shift in (0, 1)]
    with pytest.raises(TwoSchedulesError, match="version 1"):
        barrier(*(schedule_vote(begun, each) for each in proposed))
    adopted = [begun.adopted(1, schedule_of(2), step) for step in (1, 4)]
    with pytest.raises(TwoSchedulesError, match="version 1"):
        barrier(*(schedule_vote(each, None) for each in adopted))
