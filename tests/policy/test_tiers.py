# SPDX-License-Identifier: Apache-2.0
"""Which windows go to a tier, when one is whole, which are removed, which one a launch takes."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.facts.facts import Condition, LiveState
from megatron_moevement.policy.job.ranks import Layout, LogicalRank
from megatron_moevement.policy.recovery.plan import Verdict
from megatron_moevement.policy.recovery.recovery_planner import plan_from_durable, plan_recovery
from megatron_moevement.policy.tiers.tier import (
    Manifest,
    PartName,
    Reached,
    TierName,
    is_due,
    is_reported,
    may_begin_with_tier,
    newer_than,
    of_no_use,
    parts_of_all,
    reached_by,
    trained_again,
)
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.policy.window.timetable import Timetable, TimetableEntry
from tests.harness.job_facts import Job

RANKS = Layout(pp=2, ep=2).ranks
WRITERS = st.sampled_from(["0" * 16, "f" * 16])
NAMES = st.builds(TierName, st.integers(0, 3), st.integers(0, 50), WRITERS)
PARTS = st.builds(
    PartName, st.sampled_from(RANKS), st.integers(0, 2**64 - 1), st.integers(0, 2**40)
)


@given(NAMES, PARTS)
def test_names_are_read_back(name, part):
    assert TierName.parse(str(name)) == name
    assert PartName.parse(str(part)) == part


@pytest.mark.parametrize(
    "text", ["", "era1-step2", "era1-step-2-" + "0" * 16, "x-era1-step2-" + "0" * 16, "lock"]
)
def test_other_names_are_none(text):
    with pytest.raises(ValueError, match="names no"):
        TierName.parse(text)
    with pytest.raises(ValueError, match="names no"):
        PartName.parse(text)


def test_a_manifest_is_read_back_and_adds_up():
    parts = tuple(PartName(rank, place, 10 + place) for place, rank in enumerate(RANKS))
    manifest = Manifest(TierName(1, 9, "a" * 16), Window(4, 4), parts)
    assert Manifest.of_document(manifest.document()) == manifest
    assert manifest.size_bytes == sum(10 + place for place in range(len(RANKS)))
    assert manifest.part_of(RANKS[2]) == parts[2]
    assert manifest.part_of(LogicalRank(pp=7)) is None


def test_every_nth_window_of_each_schedule_is_written_from_its_first_on():
    entries = (TimetableEntry(0, 0, 4, "a"), TimetableEntry(1, 16, 2, "b"))
    timetable = Timetable(entries)
    windows = [Window(start, 4, 0) for start in range(0, 16, 4)]
    windows += [Window(start, 2, 1) for start in range(16, 28, 2)]
    due = [window.start for window in windows if is_due(timetable, window, 3)]
    assert due == [0, 12, 16, 22]
    assert all(is_due(timetable, window, 1) for window in windows)


@given(st.sets(PARTS))
def test_a_tier_is_whole_with_the_parts_of_all_ranks_alone(parts):
    whole = parts_of_all(parts, RANKS)
    having = {part.rank for part in parts}
    assert (whole is not None) == (having == set(RANKS))
    if whole is not None:
        assert [part.rank for part in whole] == sorted(RANKS)
        assert set(whole) <= parts


@given(st.sets(NAMES), st.sets(NAMES), st.sets(NAMES), NAMES, st.integers(1, 4))
def test_the_newest_whole_ones_and_those_under_way_stay(whole, begun, awaited, now, keep):
    removed = of_no_use(whole, begun, awaited, now, keep)
    stay = (whole | begun) - set(removed)
    under_way = awaited | {name for name in begun if name >= now}
    assert stay <= whole | under_way
    assert sorted(whole)[-keep:] == sorted(whole & stay)[-keep:]
    assert under_way & begun <= stay
    assert len((whole & stay) - under_way) <= keep
    assert list(removed) == sorted(removed)


def test_a_tier_is_taken_where_it_leads_further_than_anything_else():
    old, new, later = TierName(5, 30, "a"), TierName(5, 34, "b"), TierName(9, 12, "c")
    tiers = (new, later, old)
    assert newer_than(tiers, Reached(None, 0)) == (later, new, old)
    assert newer_than(tiers, Reached(None, 30)) == (new,)
    assert newer_than(tiers, Reached(None, 34)) == ()
    assert newer_than(tiers, Reached(5, 33)) == (later, new)
    assert newer_than(tiers, Reached(5, 34)) == (later,)
    assert newer_than(tiers, Reached(9, 12)) == ()


def test_what_a_plan_comes_to():
    facts = Job(Layout(pp=3), step=13).facts()
    plan = plan_recovery(facts)
    assert reached_by(plan, 4) == Reached(plan.rollbacks, 13)
    back = plan_from_durable(dataclasses.replace(facts, processes=(), durable=4), "all is lost")
    assert back.verdict is Verdict.ROLLBACK
    assert reached_by(back, 4) == Reached(None, 4)
    again = plan_from_durable(dataclasses.replace(facts, durable=10), "a window is lost")
    assert (again.verdict, again.target, again.replayed_steps) == (Verdict.GLOBAL, 13, 3)
    assert reached_by(again, 10) == Reached(None, 10)  # three steps are trained again
    assert reached_by(None, 4) == Reached(None, 4)


def test_no_process_that_trains_goes_back_to_a_tier():
    facts = Job(Layout(pp=3), step=13).facts()
    absent = LiveState(Condition.ABSENT)
    gone = [dataclasses.replace(process, live=absent) for process in facts.processes]
    plan = plan_recovery(facts)
    assert not may_begin_with_tier(facts, plan)
    assert may_begin_with_tier(dataclasses.replace(facts, processes=tuple(gone)), plan)
    one = (facts.processes[0], *gone[1:])
    assert not may_begin_with_tier(dataclasses.replace(facts, processes=one), plan)


def test_states_that_a_plan_gives_up_for_what_is_durable_are_given_up_for_a_tier():
    facts = dataclasses.replace(Job(Layout(pp=3), step=13).facts(), durable=10)
    again = plan_from_durable(facts, "a window is lost")
    assert again.verdict is Verdict.GLOBAL  # all train again what the ledger has
    assert may_begin_with_tier(facts, again)
    lost = plan_from_durable(dataclasses.replace(facts, processes=()), "all is lost")
    assert lost.verdict is Verdict.ROLLBACK
    assert may_begin_with_tier(facts, lost)


@pytest.mark.parametrize(("reached", "again"), [(10, 3), (13, 0), (14, 0)])
def test_what_is_done_again_after_a_tier_is_known_where_a_rollback_knows_it(reached, again):
    facts, name = Job(Layout(pp=3), step=13).facts(), TierName(0, reached, "f" * 16)
    back = plan_from_durable(dataclasses.replace(facts, processes=()), "all is lost")
    known = dataclasses.replace(back, target=4, lost_steps=9)
    assert trained_again(known, name) == again
    assert trained_again(dataclasses.replace(known, lost_steps=None), name) is None
    assert trained_again(plan_recovery(facts), name) is None
    assert trained_again(None, name) is None


def test_failures_in_a_row_are_reported_ever_more_rarely():
    assert [count for count in range(1, 40) if is_reported(count)] == [1, 2, 4, 8, 16, 32]
