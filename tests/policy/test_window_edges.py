"""Windows go on where they were, and begin anew only where nothing is left of them."""

import dataclasses

import pytest

from megatron_moevement.policy.job.ranks import Layout
from megatron_moevement.policy.recovery.plan import Verdict, WindowEdges
from megatron_moevement.policy.recovery.recovery_planner import plan_recovery
from tests.harness.job_facts import Job, without_processes

JOB = Job(Layout(pp=6), step=13, spares=3)


def plan_after(job, *lost, **changes):
    return plan_recovery(dataclasses.replace(without_processes(job.facts(), set(lost)), **changes))


def test_where_nobody_replays_they_go_on_with_what_anybody_holds():
    starts = {held.window.start for each in JOB.facts().processes for held in each.holdings}
    plan = plan_after(JOB)
    assert (plan.verdict, plan.windows_from) == (Verdict.RESUME, min(starts))


def test_a_replay_captures_its_window_again():
    plan = plan_after(JOB, 2)
    assert (plan.verdict, plan.windows_from) == (Verdict.LOCALIZED, plan.window.start)


@pytest.mark.parametrize("durable", [0, 1])
def test_they_begin_with_what_is_loaded(durable):
    lost = plan_after(dataclasses.replace(JOB, step=2), 0, durable=durable)
    assert lost.windows_from == durable
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
    assert (plan.edges, plan.windows_from) == (WindowEdges.RESTARTED, plan.target)
