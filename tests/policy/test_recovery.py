# SPDX-License-Identifier: Apache-2.0
"""Plans of recoveries, verdict by verdict and scope by scope: a job, a fault, and what follows.

The jobs have W = 3 and L = 1. At step 13 the windows start at 0, 3, 6, 9 and 12; the newest
persisted one is 9 .. 11, so a stage that lost its state replays the steps 10 .. 13.
"""

import dataclasses

import pytest

from megatron_moevement.policy.facts.facts import (
    Condition,
    Holding,
    InconsistentFactsError,
    LiveState,
)
from megatron_moevement.policy.job.boundary import Direction
from megatron_moevement.policy.job.ranks import Layout, LogicalRank
from megatron_moevement.policy.job.segments import Ends, ScopeKind
from megatron_moevement.policy.recovery.plan import (
    LogSource,
    Origin,
    RollForward,
    Verdict,
    WindowEdges,
)
from megatron_moevement.policy.recovery.recovery_planner import plan_recovery
from megatron_moevement.policy.window.schedule import Window
from tests.harness.facts_truth import loads_of
from tests.harness.job_facts import (
    Interrupt,
    Job,
    changed,
    interrupted,
    without_commit,
    without_log_steps,
    without_processes,
    without_slots,
)
from tests.harness.one_schedule import one_schedule

PIPELINE = Job(Layout(pp=6), step=13, spares=3)
RING = dataclasses.replace(PIPELINE, layout=Layout(pp=6, chunks=2))
TIED = dataclasses.replace(PIPELINE, ends=Ends.TIED)
REPLICATED = Job(Layout(pp=3, dp=2), step=13)
PERSISTED = Window(9, 3)


def windows_of(plan):
    """Returns the version of the schedule that is in force, and the step that it begins with."""
    newest = plan.schedules.timetable.newest
    return newest.schedule_version, newest.first_step


def plan_after(job, *lost):
    return plan_recovery(without_processes(job.facts(), set(lost)))


def test_resume_when_every_rank_has_committed_the_target():
    plan = plan_after(PIPELINE)
    assert (plan.verdict, plan.target) == (Verdict.RESUME, 13)
    assert plan.scope_kind is ScopeKind.NONE


def test_resume_when_only_a_spare_is_lost():
    assert plan_after(PIPELINE, 7).verdict is Verdict.RESUME


def test_resume_when_the_others_can_apply_what_one_rank_has_committed():
    behind = frozenset(PIPELINE.layout.ranks[1:])
    plan = plan_recovery(dataclasses.replace(PIPELINE, behind=behind).facts())
    assert (plan.verdict, plan.target) == (Verdict.RESUME, 13)
    assert plan.roll_forward == tuple(RollForward(rank, 13) for rank in sorted(behind))


def test_the_target_falls_back_when_nobody_who_committed_it_survives():
    behind = frozenset(PIPELINE.layout.ranks[1:])
    plan = plan_after(dataclasses.replace(PIPELINE, behind=behind), 0)
    assert (plan.verdict, plan.target) == (Verdict.LOCALIZED, 12)
    assert plan.roll_forward == ()


def test_a_survivor_that_can_not_roll_forward_is_never_papered_over():
    facts = PIPELINE.facts()
    slow = dataclasses.replace(
        facts.processes[2], committed=12, live=LiveState(Condition.DENSE, 12)
    )
    with pytest.raises(InconsistentFactsError, match=r"pp2\."):
        plan_recovery(changed(facts, {2: slow}))


@pytest.mark.parametrize("live", [LiveState(Condition.DENSE, 14), LiveState(Condition.DENSE, 15)])
def test_a_state_beyond_what_any_journal_has_is_never_a_bystander(live):
    facts = PIPELINE.facts()
    ahead = dataclasses.replace(facts.processes[1], live=live)
    with pytest.raises(InconsistentFactsError, match=f"process 1 holds step {live.step}"):
        plan_recovery(without_processes(changed(facts, {1: ahead}), {2}))


def test_localized_to_the_stage_that_lost_a_rank():
    plan = plan_after(PIPELINE, 2)
    assert (plan.verdict, plan.scope_kind) == (Verdict.LOCALIZED, ScopeKind.SINGLE_STAGE)
    assert (plan.window, plan.start_of, plan.replayed_steps) == (PERSISTED, {2: 9}, 4)
    assert set(plan.logs) == {
        LogSource(2, 1, Direction.FORWARD, 10, 13),
        LogSource(2, 3, Direction.BACKWARD, 10, 13),
    }
    assert {each.rank.pp for each in plan.slot_fetches() if each.source != each.rank.pp} == {2}


def test_a_torn_commit_is_a_lost_state_although_its_process_lives():
    plan = plan_recovery(without_commit(PIPELINE.facts(), {2}))
    assert (plan.verdict, plan.start_of) == (Verdict.LOCALIZED, {2: 9})


def test_replicas_of_a_lost_rank_replay_with_it_from_their_own_slots():
    plan = plan_after(REPLICATED, 2)
    assert plan.start_of == {1: 9}
    assert {each.source for each in plan.fetches_of(LogicalRank(1, 1))} == {3}


def test_localized_to_neighbours_that_send_to_each_other_live():
    plan = plan_after(PIPELINE, 2, 3)
    assert (plan.scope_kind, plan.segments) == (ScopeKind.ADJACENT_SEGMENT, ((2, 3),))
    assert {(log.receiver, log.sender) for log in plan.logs} == {(2, 1), (3, 4)}


def test_localized_to_stages_far_apart():
    plan = plan_after(PIPELINE, 1, 4)
    assert (plan.scope_kind, plan.segments) == (ScopeKind.DISJOINT_SEGMENTS, ((1,), (4,)))


def test_tied_ends_replay_together_and_the_middle_serves_both():
    plan = plan_after(TIED, 0)
    assert (plan.scope_kind, plan.segments) == (ScopeKind.TIED_ENDS, ((0,), (5,)))
    assert plan.verdict is Verdict.LOCALIZED
    assert {(log.receiver, log.sender) for log in plan.logs} == {(0, 1), (5, 4)}


def test_tied_ends_need_no_replay_when_a_middle_stage_is_lost():
    assert plan_after(TIED, 2).start_of == {2: 9}


def test_interleaved_ends_are_neighbours():
    plan = plan_after(RING, 0, 5)
    assert (plan.scope_kind, plan.segments) == (ScopeKind.ADJACENT_SEGMENT, ((5, 0),))
    assert {(log.receiver, log.sender) for log in plan.logs} == {(5, 4), (0, 1)}


def test_an_interleaved_stage_alone_reads_the_logs_of_both_its_neighbours_round_the_ring():
    plan = plan_after(RING, 0)
    assert {(log.sender, log.direction) for log in plan.logs} == {
        (5, Direction.FORWARD),
        (1, Direction.BACKWARD),
    }


def test_a_neighbour_whose_log_has_a_gap_joins():
    facts = without_log_steps(without_processes(PIPELINE.facts(), {2}), 3, {11})
    plan = plan_recovery(facts)
    assert (plan.verdict, plan.segments) == (Verdict.LOCALIZED, ((2, 3),))
    assert "stage 3 joined" in plan.reason


def test_a_gap_that_nobody_reads_costs_nothing():
    facts = without_log_steps(without_processes(PIPELINE.facts(), {2}), 4, {11})
    assert plan_recovery(facts).start_of == {2: 9}


def test_global_when_every_stage_lost_its_state():
    plan = plan_after(dataclasses.replace(REPLICATED, spares=3), 0, 2, 4)
    assert (plan.verdict, plan.scope_kind) == (Verdict.GLOBAL, ScopeKind.ALL)
    assert plan.logs == ()


def test_global_when_gaps_in_the_logs_reach_every_stage():
    facts = without_processes(PIPELINE.facts(), {2})
    for process in range(6):
        if process != 2:
            facts = without_log_steps(facts, process, {12})
    plan = plan_recovery(facts)
    assert (plan.verdict, plan.replayed_steps) == (Verdict.GLOBAL, 4)


def test_global_of_an_interleaved_pipeline_is_one_ring():
    facts = without_processes(RING.facts(), {2})
    for process in (0, 1, 3, 4, 5):
        facts = without_log_steps(facts, process, {12})
    assert plan_recovery(facts).scope_kind is ScopeKind.WHOLE_RING


def test_one_stage_is_global_and_says_why():
    plan = plan_after(Job(Layout(dp=4), step=13), 0)
    assert plan.verdict is Verdict.GLOBAL
    assert "one stage only" in plan.reason


def test_all_replay_from_the_initial_state_when_no_window_was_persisted_yet():
    plan = plan_after(Job(Layout(pp=2), step=2, durable=0), 0)
    assert (plan.verdict, plan.target, plan.rollbacks, plan.lost_steps) == (Verdict.GLOBAL, 2, 0, 0)
    assert (plan.window, plan.start_of, plan.is_apart) == (None, {0: 0, 1: 0}, False)
    assert {replay.origin for replay in plan.replays} == {Origin.DURABLE}
    assert (plan.edges, windows_of(plan)) == (WindowEdges.KEPT, (0, 0))
    assert (plan.ledger_source, plan.first_ledger_step, plan.replayed_steps) == (1, 1, 2)
    assert plan.reason.endswith("no window was persisted yet: all replay from the initial state")


def test_rollback_without_the_ledger_of_a_step_since():
    facts = without_processes(Job(Layout(pp=2), step=2, durable=0).facts(), {0})
    gaps = {
        each.process: dataclasses.replace(each, ledger=range(2, 3))
        for each in facts.processes
        if each.rank is not None
    }
    plan = plan_recovery(changed(facts, gaps))
    assert (plan.verdict, plan.target, plan.rollbacks, plan.lost_steps) == (
        Verdict.ROLLBACK,
        0,
        1,
        2,
    )
    assert "no window was persisted yet" in plan.reason


@pytest.mark.parametrize(
    ("durable", "verdict", "target", "lost"),
    [(6, Verdict.ROLLBACK, 6, 7), (10, Verdict.GLOBAL, 13, 0)],
)
def test_what_is_durable_counts_when_every_holder_of_a_slot_is_lost(durable, verdict, target, lost):
    facts = PIPELINE.facts()
    rank = LogicalRank(2)
    for process in range(9):
        facts = without_slots(facts, process, rank, 0b010)
    facts = dataclasses.replace(without_processes(facts, {2}), durable=durable)
    plan = plan_recovery(facts)
    assert (plan.verdict, plan.target, plan.lost_steps) == (verdict, target, lost)
    assert (plan.edges, plan.persisted) == (WindowEdges.RESTARTED, None)
    assert windows_of(plan)[0] == 1
    assert "no persisted window is whole" in plan.reason


def with_a_slot_in_flight_damaged(job):
    """Lets all copies of S_4 of one rank be damaged; nobody is lost."""
    facts = job.facts()
    for process in range(len(facts.processes)):
        facts = without_slots(facts, process, LogicalRank(1), 0b010)
    return facts


def test_windows_begin_anew_when_a_slot_is_lost_and_all_states_stand():
    job = Job(Layout(pp=2), step=5, durable=2)  # the windows start at 0 and 3
    plan = plan_recovery(with_a_slot_in_flight_damaged(job))
    assert (plan.verdict, plan.target) == (Verdict.RESUME, 5)
    assert (plan.edges, plan.persisted) == (WindowEdges.RESTARTED, None)
    assert windows_of(plan) == (1, 5)
    assert (
        "stage 1 lost a slot, no persisted window is whole: the window schedule restarts"
        in plan.reason
    )


def test_no_state_stands_when_one_is_lost_beside_a_slot():
    job = Job(Layout(pp=2), step=5, durable=2)
    plan = plan_recovery(without_processes(with_a_slot_in_flight_damaged(job), {0}))
    assert (plan.verdict, plan.target, plan.start_of) == (Verdict.GLOBAL, 5, {0: 2, 1: 2})


def test_who_follows_the_others_does_so_before_windows_begin_anew():
    job = Job(Layout(pp=2), step=5, behind=frozenset({LogicalRank(0)}))
    plan = plan_recovery(with_a_slot_in_flight_damaged(job))
    assert (plan.verdict, plan.edges) == (Verdict.RESUME, WindowEdges.RESTARTED)
    assert plan.roll_forward == (RollForward(LogicalRank(0), 5),)


def with_what_travels_with_slots(facts):
    """Lets spares publish what the ranks sent them together with their slots."""
    told = {
        each.process: dataclasses.replace(
            each,
            committed=13,
            persisted=PERSISTED,
            ledger=range(10, 14),
            timetable=one_schedule(3),
        )
        for each in facts.processes
        if each.rank is None
    }
    return changed(facts, told)


def test_spares_alone_go_on_with_what_came_with_the_slots():
    job = Job(Layout(pp=2), step=13, spares=3)
    plan = plan_recovery(without_processes(with_what_travels_with_slots(job.facts()), {0, 1}))
    assert (plan.verdict, plan.target, plan.window) == (Verdict.GLOBAL, 13, PERSISTED)
    assert plan.start_of == {0: 9, 1: 9}


def test_a_second_fault_leaves_a_disjoint_recovery_what_it_has_reached():
    first = without_processes(PIPELINE.facts(), {1})
    cut = interrupted(first, plan_recovery(first), Interrupt({1: 12}))
    plan = plan_recovery(without_processes(cut, {4}))
    assert plan.start_of == {1: 12, 4: 9}
    assert [replay.origin for replay in plan.replays] == [Origin.KEPT, Origin.WINDOW]
    assert [replay.converts for replay in plan.replays] == [False, True]


@pytest.mark.parametrize("step", [9, 10])
def test_a_second_fault_leaves_a_disjoint_recovery_a_window_that_it_converts(step):
    first = without_processes(PIPELINE.facts(), {1})
    cut = interrupted(first, plan_recovery(first), Interrupt({1: step}))
    plan = plan_recovery(without_processes(cut, {4}))
    assert plan.start_of == {1: step, 4: 9}
    assert [replay.origin for replay in plan.replays] == [Origin.KEPT, Origin.WINDOW]
    assert [replay.converts for replay in plan.replays] == [True, True]
    assert [one.slot.step for one in plan.fetches_of(LogicalRank(pp=1))] == [9, 10, 11]


def test_stages_that_begin_at_other_steps_replay_apart_although_all_replay():
    job = Job(Layout(pp=2), step=13)
    first = without_processes(job.facts(), {1})
    cut = interrupted(first, plan_recovery(first), Interrupt({1: 12}))
    plan = plan_recovery(without_processes(cut, {0}))
    assert (plan.verdict, plan.start_of, plan.is_apart) == (Verdict.GLOBAL, {0: 9, 1: 12}, True)
    assert not plan_after(job, 0, 1).is_apart
    assert plan_after(PIPELINE, 2).is_apart


def test_the_entry_of_a_step_that_is_rolled_forward_in_mid_replay_is_shared():
    first = without_processes(REPLICATED.facts(), {2})
    behind = frozenset({LogicalRank(1, 1)})
    cut = interrupted(first, plan_recovery(first), Interrupt({1: 12}, behind))
    plan = plan_recovery(cut)
    assert plan.start_of == {1: 12}
    assert plan.roll_forward == (RollForward(LogicalRank(1, 1), 12),)
    assert plan.first_ledger_step == 12
    assert plan_after(PIPELINE, 2).first_ledger_step == 10
    assert plan_after(PIPELINE).first_ledger_step == 13


def test_a_half_converted_window_is_converted_further():
    first = without_processes(PIPELINE.facts(), {1})
    cut = interrupted(first, plan_recovery(first), Interrupt({1: 10}))
    plan = plan_recovery(cut)
    assert plan.start_of == {1: 10}
    assert loads_of(plan, cut) == {LogicalRank(1): 1}


def test_of_tied_ends_only_the_one_that_waits_for_the_last_slot_loads_it():
    first = without_processes(TIED.facts(), {0})
    lagging = frozenset(TIED.layout.stage_ranks(5))
    cut = interrupted(first, plan_recovery(first), Interrupt({0: 11, 5: 11}, lagging))
    plan = plan_recovery(cut)
    assert plan.start_of == {0: 11, 5: 11}
    assert loads_of(plan, cut) == {LogicalRank(5): 2}


def test_a_neighbour_of_a_replay_that_is_lost_reads_what_the_replay_logged_again():
    first = without_processes(PIPELINE.facts(), {1})
    cut = interrupted(first, plan_recovery(first), Interrupt({1: 12}))
    plan = plan_recovery(without_processes(cut, {2}))
    assert plan.start_of == {1: 12, 2: 9}
    assert LogSource(2, 1, Direction.FORWARD, 10, 12) in plan.logs


def test_what_an_older_era_left_is_not_mixed_with_a_rollback():
    facts = PIPELINE.facts()
    newer = {
        each.process: dataclasses.replace(
            each, rollbacks=1, committed=10, live=LiveState(Condition.DENSE, 10), persisted=None
        )
        for each in facts.processes[:3]
    }
    plan = plan_recovery(dataclasses.replace(changed(facts, newer), durable=10))
    assert (plan.verdict, plan.target, plan.rollbacks) == (Verdict.ROLLBACK, 10, 2)


def test_of_two_whole_windows_the_newest_persisted_one_is_replayed_from():
    facts = without_processes(PIPELINE.facts(), {2})
    older = {
        each.process: dataclasses.replace(
            each,
            holdings=(
                *(Holding(held.owner, Window(6, 3), 0b111) for held in each.holdings),
                *each.holdings,
            ),
        )
        for each in facts.processes
    }
    assert plan_recovery(changed(facts, older)).window == PERSISTED


def test_the_ledger_comes_from_a_process_that_has_its_start_too():
    facts = without_processes(PIPELINE.facts(), {2})
    young = dataclasses.replace(facts.processes[0], ledger=range(12, 14))
    plan = plan_recovery(changed(facts, {0: young}))
    assert (plan.ledger_source, plan.replayed_steps) == (1, 4)
