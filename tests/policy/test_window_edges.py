# SPDX-License-Identifier: Apache-2.0
"""Windows go on where they were, and begin anew only where nothing is left of them."""

import dataclasses

import pytest

from megatron_moevement.policy.facts.facts import InconsistentFactsError
from megatron_moevement.policy.job.ranks import Layout
from megatron_moevement.policy.recovery.plan import Verdict, WindowEdges
from megatron_moevement.policy.recovery.recovery_planner import plan_recovery
from tests.harness.job_facts import Job, without_processes
from tests.harness.one_schedule import one_schedule

JOB = Job(Layout(pp=6), step=13, spares=3)


def plan_after(job, *lost, **changes):
    return plan_recovery(dataclasses.replace(without_processes(job.facts(), set(lost)), **changes))


def test_where_nobody_replays_they_go_on_with_what_anybody_holds():
    plan = plan_after(JOB)
    assert (plan.verdict, plan.schedules.timetable) == (Verdict.RESUME, JOB.timetable)


def test_a_replay_captures_its_window_again():
    plan = plan_after(JOB, 2)
    assert (plan.verdict, plan.schedules.timetable) == (Verdict.LOCALIZED, JOB.timetable)
    assert plan.schedules.timetable.has(plan.window)


@pytest.mark.parametrize("lost", [(), (2,)])
def test_ranks_that_know_different_schedules_by_one_version_end_a_recovery(lost):
    facts = without_processes(JOB.facts(), set(lost))
    first, *others = facts.processes
    other = dataclasses.replace(first, timetable=one_schedule(JOB.window + 1))
    with pytest.raises(InconsistentFactsError, match="windows of it can't be read"):
        plan_recovery(dataclasses.replace(facts, processes=(other, *others)))


def test_windows_of_a_schedule_that_nobody_knows_are_not_replayed_from():
    facts = without_processes(JOB.facts(), {2})
    anew = one_schedule(JOB.window, first_step=JOB.step)
    processes = tuple(
        each if each.timetable is None else dataclasses.replace(each, timetable=anew)
        for each in facts.processes
    )
    plan = plan_recovery(dataclasses.replace(facts, processes=processes))
    assert (plan.verdict, plan.window) == (Verdict.ROLLBACK, None)


@pytest.mark.parametrize("durable", [0, 1])
def test_they_begin_with_what_is_loaded(durable):
    lost = plan_after(dataclasses.replace(JOB, step=2), 0, durable=durable)
    assert lost.schedules.timetable.first_step == durable
    assert lost.is_from_durable or lost.edges is WindowEdges.RESTARTED


def test_where_a_slot_is_nowhere_they_begin_with_the_state_that_stands():
    facts = dataclasses.replace(JOB, step=2).facts()
    rank = facts.layout.ranks[3]
    processes = tuple(
        dataclasses.replace(
            each, holdings=tuple(held for held in each.holdings if held.owner != rank)
        )
        for each in facts.processes
    )
    plan = plan_recovery(dataclasses.replace(facts, processes=processes))
    assert (plan.edges, plan.schedules.timetable) == (
        WindowEdges.RESTARTED,
        facts.processes[0].timetable.restarted(plan.target),
    )


def test_windows_begin_anew_at_a_checkpoint_in_the_first_window():
    plan = plan_after(Job(Layout(pp=2), step=2, durable=1), 0)
    assert (plan.verdict, plan.target, plan.start_of) == (Verdict.GLOBAL, 2, {0: 1, 1: 1})
    assert plan.edges is WindowEdges.RESTARTED
    assert plan.schedules.timetable == JOB.timetable.restarted(1)
    assert plan.reason.endswith("all replay from the durable checkpoint of step 1")


def test_spares_alone_that_know_of_no_commit_go_back():
    plan = plan_after(Job(Layout(pp=2), step=13, spares=3), 0, 1, durable=10)
    assert (plan.verdict, plan.target) == (Verdict.ROLLBACK, 10)
    assert "no process has a committed step" in plan.reason
