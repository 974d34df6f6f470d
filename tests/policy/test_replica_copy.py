# SPDX-License-Identifier: Apache-2.0
"""A lost state is copied where a survivor holds the same bits, and never elsewhere."""

import dataclasses

import pytest
from hypothesis import given, settings

from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.facts.facts import Condition, LiveState
from megatron_moevement.policy.job.ranks import Layout, LogicalRank
from megatron_moevement.policy.recovery.plan import Origin, StateCopy, Verdict, WindowEdges
from megatron_moevement.policy.recovery.recovery_planner import plan_recovery
from megatron_moevement.policy.window.schedule import Window
from tests.harness.facts_strategies import first_faults, second_faults
from tests.harness.job_facts import (
    Job,
    changed,
    with_replicas,
    without_commit,
    without_log_steps,
    without_processes,
    without_slots,
)

JOB = Job(Layout(pp=3, dp=2), step=13)
"""Processes 0 to 5 train, two a stage; 6 and 7 are spares. Steps 9 to 11 are persisted."""
often = settings(max_examples=30, deadline=None)
CASES = first_faults() | second_faults()
GETTING_WORSE = [
    (Verdict.RESUME, WindowEdges.KEPT),
    (Verdict.COPIED, WindowEdges.KEPT),
    (Verdict.LOCALIZED, WindowEdges.KEPT),
    (Verdict.GLOBAL, WindowEdges.KEPT),
    (Verdict.RESUME, WindowEdges.RESTARTED),
    (Verdict.COPIED, WindowEdges.RESTARTED),
    Origin.DURABLE,
    (Verdict.ROLLBACK, WindowEdges.RESTARTED),
]


def kind_of(plan):
    return Origin.DURABLE if plan.is_from_durable else (plan.verdict, plan.edges)


def plan_after(*lost, job=JOB, change=lambda facts: facts):
    return plan_recovery(with_replicas(change(without_processes(job.facts(), set(lost)))))


def process_of(facts, number):
    return next(each for each in facts.processes if each.process == number)


def test_a_replica_at_the_target_is_copied_and_nobody_replays():
    plan = plan_after(2)
    assert plan.verdict is Verdict.COPIED
    assert plan.copies == (StateCopy(LogicalRank(1, 0), 3),)
    assert (plan.target, plan.replayed_steps, plan.replays, plan.window) == (13, 0, (), None)
    assert plan.reason == "stage 1 lost state of 1 rank, replicas hold step 13"
    assert plan.ledger_source in {0, 1, 3, 4, 5}


def test_without_names_or_with_names_of_their_own_the_stage_replays():
    facts = without_processes(JOB.facts(), {2})
    assert plan_recovery(facts).verdict is Verdict.LOCALIZED
    named = with_replicas(facts)
    apart = {
        each.process: dataclasses.replace(each, replica_id=f"{each.replica_id}.{each.process}")
        for each in named.processes
    }
    assert plan_recovery(changed(named, apart)) == plan_recovery(facts)


def test_streams_that_differed_at_the_target_make_the_stage_replay():
    facts = with_replicas(without_processes(JOB.facts(), {2}))
    unlike = {
        each.process: dataclasses.replace(each, rng_equal_steps=range(each.ledger.start, 13))
        for each in facts.processes
    }
    plan = plan_recovery(changed(facts, unlike))
    assert (plan.verdict, plan.copies, plan.start_of) == (Verdict.LOCALIZED, (), {1: 9})


def test_one_who_knows_that_the_streams_were_alike_is_enough():
    facts = with_replicas(without_processes(JOB.facts(), {2}))
    unlike = {
        each.process: dataclasses.replace(each, rng_equal_steps=range(0))
        for each in facts.processes
        if each.process != 5
    }
    assert plan_recovery(changed(facts, unlike)).verdict is Verdict.COPIED


def test_a_replica_one_step_behind_rolls_forward_before_it_is_copied():
    behind = dataclasses.replace(JOB, behind=frozenset({LogicalRank(1, 1)}))
    plan = plan_after(2, job=behind)
    assert (plan.verdict, plan.target) == (Verdict.COPIED, 13)
    assert [(roll.rank, roll.step) for roll in plan.roll_forward] == [(LogicalRank(1, 1), 13)]
    assert plan.copies == (StateCopy(LogicalRank(1, 0), 3),)
    assert plan.reason.endswith("replicas hold step 13, 1 rank rolls forward to it")


def test_the_target_is_the_survivors_where_only_the_lost_had_committed_more():
    behind = frozenset(JOB.layout.ranks) - {LogicalRank(1, 0)}
    plan = plan_after(2, job=dataclasses.replace(JOB, behind=behind))
    assert (plan.verdict, plan.target, plan.roll_forward) == (Verdict.COPIED, 12, ())


@pytest.mark.parametrize(
    "live",
    [
        LiveState(Condition.TORN, 12),
        LiveState(Condition.ABSENT),
        LiveState(Condition.PARTIAL, 10, Window(9, 3)),
        LiveState(Condition.DENSE, 12),
    ],
    ids=lambda live: live.condition.value,
)
def test_a_replica_that_does_not_hold_the_target_is_not_copied(live):
    facts = with_replicas(without_processes(JOB.facts(), {2}))
    other = dataclasses.replace(process_of(facts, 3), live=live)
    plan = plan_recovery(changed(facts, {3: other}))
    assert (plan.verdict, plan.copies) == (Verdict.LOCALIZED, ())


def test_a_torn_commit_is_replaced_by_a_copy_too():
    plan = plan_recovery(with_replicas(without_commit(JOB.facts(), {2})))
    assert (plan.verdict, plan.copies) == (Verdict.COPIED, (StateCopy(LogicalRank(1, 0), 3),))


def test_experts_without_a_replica_are_replayed():
    plan = plan_after(2, job=Job(Layout(pp=3, ep=2), step=13))
    assert (plan.verdict, plan.copies) == (Verdict.LOCALIZED, ())


def test_who_shares_the_experts_is_copied_of_several_data_parallel_ranks():
    job = Job(Layout(pp=2, dp=2, ep=2), step=13)
    (lost,) = [host.process for host in job.hosts if host.rank == LogicalRank(1, 0, ep=1)]
    (copy,) = plan_after(lost, job=job).copies
    (source,) = [host for host in job.hosts if host.process == copy.source]
    assert source.rank == LogicalRank(1, 1, ep=1)


def test_tensor_parallel_ranks_are_no_replicas():
    assert plan_after(2, job=Job(Layout(pp=3, tp=2), step=13)).verdict is Verdict.LOCALIZED


def test_several_copies_come_from_several_replicas():
    plan = plan_after(0, 1, job=Job(Layout(dp=4), step=13))
    assert {copy.source for copy in plan.copies} == {2, 3}


def test_one_stage_replays_and_another_one_far_away_copies():
    plan = plan_after(0, 6, 7, job=Job(Layout(pp=4, dp=2), step=13, spares=3))
    assert (plan.verdict, plan.start_of) == (Verdict.LOCALIZED, {3: 9})
    assert plan.copies == (StateCopy(LogicalRank(0, 0), 1),)
    assert "stage 0 copied from replicas" in plan.reason


def test_a_stage_whose_log_is_needed_replays_instead_of_copying():
    plan = plan_after(0, 2, 3, job=dataclasses.replace(JOB, spares=3))
    assert (plan.verdict, plan.start_of, plan.copies) == (Verdict.LOCALIZED, {0: 9, 1: 9}, ())


def test_who_was_copied_has_no_log_so_its_stage_joins_a_neighbour_that_is_lost_later():
    facts = without_processes(dataclasses.replace(JOB, spares=4).facts(), {2, 3})
    later = without_log_steps(facts, 0, range(14))  # process 0 was copied to at step 13
    plan = plan_recovery(with_replicas(later))
    assert plan.start_of == {0: 9, 1: 9}
    assert {(log.receiver, log.sender) for log in plan.logs} == {(1, 2)}
    two = dataclasses.replace(JOB, layout=Layout(pp=2, dp=2), spares=4)
    later = without_log_steps(without_processes(two.facts(), {2, 3}), 0, range(14))
    assert plan_recovery(with_replicas(later)).verdict is Verdict.GLOBAL


def lose_slots(facts, rank, slots):
    """Takes slots of all windows of a rank away from everybody."""
    for each in facts.processes:
        facts = without_slots(facts, each.process, rank, slots)
    return facts


def stand_ins(plan, rank):
    """Returns the slots of replicas that a rank takes."""
    return tuple(one.slot for one in plan.fetches_of(rank) if one.slot.owner != rank)


FIRST_SLOT = 0b001


def test_a_slot_that_nobody_has_comes_from_the_replica():
    plan = plan_after(2, change=lambda facts: lose_slots(facts, LogicalRank(1, 0), 0b110))
    slots = tuple(SlotKey(LogicalRank(1, 1), Window(9, 3), slot) for slot in (1, 2))
    assert plan.copies == (StateCopy(LogicalRank(1, 0), 3),)
    assert stand_ins(plan, LogicalRank(1, 0)) == slots


def test_where_no_replica_has_the_slot_either_the_states_are_copied_and_windows_begin_anew():
    def lose(facts):
        facts = lose_slots(facts, LogicalRank(1, 0), FIRST_SLOT)
        return lose_slots(facts, LogicalRank(1, 1), FIRST_SLOT)

    plan = plan_after(2, change=lose)
    assert (plan.verdict, plan.edges) == (Verdict.COPIED, WindowEdges.RESTARTED)
    assert plan.copies == (StateCopy(LogicalRank(1, 0), 3),)


def test_a_slot_of_a_step_with_unlike_streams_is_not_taken():
    facts = lose_slots(without_processes(JOB.facts(), {2}), LogicalRank(1, 0), FIRST_SLOT)
    facts = with_replicas(facts)
    unlike = {
        each.process: dataclasses.replace(each, rng_equal_steps=range(13, 14))
        for each in facts.processes
    }
    plan = plan_recovery(changed(facts, unlike))
    assert (plan.fetches, plan.edges) == ((), WindowEdges.RESTARTED)


def test_a_slot_in_flight_that_is_nowhere_makes_the_stage_replay():
    """Slot 0 of the window from step 12 on; the window before is whole."""

    def lose(facts):
        for each in facts.processes:
            kept = tuple(
                held for held in each.holdings if held.window.start < 12 or held.owner.pp != 1
            )
            facts = changed(facts, {each.process: dataclasses.replace(each, holdings=kept)})
        return facts

    plan = plan_after(2, change=lose)
    assert (plan.verdict, plan.start_of, plan.copies) == (Verdict.LOCALIZED, {1: 9}, ())


@often
@given(CASES)
def test_a_copy_is_of_the_target_and_of_the_same_name(case):
    facts = with_replicas(case.facts)
    plan = plan_recovery(facts)
    knowing = [each for each in facts.processes if plan.target in each.rng_equal_steps]
    rolling = {roll.rank: roll.step for roll in plan.roll_forward}
    for copy in plan.copies:
        source, lost = process_of(facts, copy.source), facts.by_rank[copy.rank]
        assert knowing
        assert lost.live.condition in {Condition.TORN, Condition.ABSENT}
        assert source.live.condition is Condition.DENSE
        assert rolling.get(source.rank, source.live.step) == plan.target
        assert source.replica_id == lost.replica_id
        assert source.rank.pp == copy.rank.pp
        assert source.rank.pp not in plan.start_of
    assert len({copy.rank for copy in plan.copies}) == len(plan.copies)


@often
@given(CASES)
def test_after_a_plan_that_copies_every_stage_holds_the_target_or_replays_to_it(case):
    facts = with_replicas(case.facts)
    plan = plan_recovery(facts)
    if plan.verdict is Verdict.ROLLBACK:
        assert not plan.copies
        return
    assert (plan.verdict is Verdict.COPIED) == (bool(plan.copies) and not plan.replays)
    copied = {copy.rank for copy in plan.copies}
    rolling = {roll.rank: roll.step for roll in plan.roll_forward}
    for rank, process in facts.by_rank.items():
        if rank.pp not in plan.start_of and rank not in copied:
            assert process.live.condition is Condition.DENSE
            assert rolling.get(rank, process.live.step) == plan.target


@often
@given(CASES)
def test_a_rank_that_is_copied_has_every_slot_of_the_windows_to_come(case):
    facts = with_replicas(case.facts)
    plan = plan_recovery(facts)
    if plan.edges is WindowEdges.RESTARTED:
        return
    alike = {step for each in facts.processes for step in each.rng_equal_steps}
    first = 0 if plan.persisted is None else plan.persisted.start
    for copy in plan.copies:
        source = process_of(facts, copy.source)
        own = {held_step for each in facts.processes for held_step in steps_of(each, copy.rank)}
        slots = stand_ins(plan, copy.rank)
        for slot in slots:
            assert slot.owner == source.rank  # as nobody has one of the rank
            assert slot.step in steps_of(source, source.rank)
            assert slot.step in alike
            assert slot.step not in own
        if plan.persisted is not None:
            assert {*own, *(slot.step for slot in slots)} >= set(range(first, plan.target))


def steps_of(process, owner):
    """Returns the steps of a rank's slots that a process holds."""
    return {
        holding.window.step_of(slot)
        for holding in process.holdings
        if holding.owner == owner
        for slot in range(holding.window.size)
        if holding.slots >> slot & 1
    }


@often
@given(CASES)
def test_replicas_never_make_a_plan_worse(case):
    plain, plan = plan_recovery(case.facts), plan_recovery(with_replicas(case.facts))
    former, now = (GETTING_WORSE.index(kind_of(each)) for each in (plain, plan))
    assert now <= former
    if plain.verdict in {Verdict.LOCALIZED, Verdict.GLOBAL}:
        for stage in range(case.facts.layout.pp):
            assert plan.start(stage) >= plain.start(stage)
        kept = {each.stage for each in plain.replays if each.origin is Origin.KEPT}
        assert kept >= {each.stage for each in plan.replays if each.origin is Origin.KEPT}


@often
@given(CASES)
def test_without_streams_that_were_alike_nothing_changes(case):
    facts = with_replicas(case.facts)
    unlike = {
        each.process: dataclasses.replace(each, rng_equal_steps=range(0))
        for each in facts.processes
    }
    assert plan_recovery(changed(facts, unlike)) == plan_recovery(case.facts)


@often
@given(CASES)
def test_the_order_of_the_processes_does_not_matter(case):
    facts = with_replicas(case.facts)
    turned = dataclasses.replace(facts, processes=facts.processes[::-1])
    assert plan_recovery(turned).digest == plan_recovery(facts).digest
