# SPDX-License-Identifier: Apache-2.0
"""Plans of recoveries: what must hold for every job, every fault and every second fault.

What is expected is derived here from the faults and the facts by trying all possibilities, not by
growing a scope as the policy does.
"""

import dataclasses
import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_moevement.policy.copies.retention import max_replayed_steps
from megatron_moevement.policy.facts.facts import Condition, InconsistentFactsError, LiveState
from megatron_moevement.policy.job.boundary import is_ring
from megatron_moevement.policy.job.ranks import Layout
from megatron_moevement.policy.job.segments import Ends
from megatron_moevement.policy.recovery.plan import Origin, Verdict, WindowEdges
from megatron_moevement.policy.recovery.recovery_planner import plan_recovery
from tests.harness.facts_strategies import (
    LAYOUTS,
    first_faults,
    jobs,
    second_faults,
    with_another_copy,
)
from tests.harness.facts_truth import (
    has_all,
    holders,
    learnt_windows,
    loads_of,
    logged,
    neighbours,
    persisted_windows,
    target_of,
    with_ledger,
)
from tests.harness.job_facts import Job, changed, without_processes

REPLAYS = {Verdict.LOCALIZED, Verdict.GLOBAL}
GETTING_WORSE = [
    (Verdict.RESUME, WindowEdges.KEPT),
    (Verdict.LOCALIZED, WindowEdges.KEPT),
    (Verdict.GLOBAL, WindowEdges.KEPT),
    (Verdict.RESUME, WindowEdges.RESTARTED),
    Origin.DURABLE,
    (Verdict.ROLLBACK, WindowEdges.RESTARTED),
]
CASES = first_faults() | second_faults()


def kind_of(plan):
    return Origin.DURABLE if plan.is_from_durable else (plan.verdict, plan.edges)


pytestmark = pytest.mark.timeout(300)
often = settings(max_examples=60)


def best_starts(case, window):
    """Tries all ways in which stages keep what they have or go back; returns what keeps most.

    A way is possible when every tensor that a replay receives is sent again or logged, and coupled
    stages step together. All go back to a window of which a ring must soon have dropped slots.
    """
    facts, layout = case.facts, case.facts.layout
    if window < max(learnt_windows(facts)) or target_of(facts) > window.start + 2 * window.size:
        return (window.start,) * layout.pp
    last = layout.pp - 1
    tied = facts.ends is Ends.TIED and last > 0
    choices = []
    for stage in range(layout.pp):
        state = case.left[stage]
        usable = state is not None and state[0] >= window.start and state[1] in {None, window}
        choices.append({window.start, state[0]} if usable else {window.start})
    logs = {
        (sender, way): logged(facts, sender, way)
        for stage in range(layout.pp)
        for way, sender in neighbours(layout, stage)
    }

    def is_possible(starts):
        if tied and starts[0] != starts[last]:
            return False
        return all(
            logs[sender, direction].issuperset(range(starts[stage] + 1, starts[sender] + 1))
            for stage in range(layout.pp)
            for direction, sender in neighbours(layout, stage)
        )

    possible = [starts for starts in itertools.product(*choices) if is_possible(starts)]
    return max(possible, key=sum)


def first_slots(case, window, starts):
    """Returns for each rank that has operators to activate the first slot that it needs."""
    return {
        rank: starts[stage] - window.start
        for stage, state in case.left.items()
        if state is None or state[0] != starts[stage] or state[1] is not None
        for rank in case.facts.layout.stage_ranks(stage)
    }


def stands(case, states):
    """Returns whether every stage holds the target whole."""
    return all(state == (target_of(case.facts), None) for state in states.values())


@often
@given(CASES, st.randoms(use_true_random=False))
def test_the_order_of_the_processes_does_not_matter(case, random):
    plan = plan_recovery(case.facts)
    processes = list(case.facts.processes)
    random.shuffle(processes)
    again = plan_recovery(dataclasses.replace(case.facts, processes=tuple(processes)))
    assert again == plan
    assert again.digest == plan.digest


@often
@given(CASES, CASES)
def test_different_plans_have_different_digests(case, other):
    plan, second = plan_recovery(case.facts), plan_recovery(other.facts)
    assert (plan.digest == second.digest) == (repr(plan) == repr(second))


@often
@given(CASES)
def test_the_target_is_the_newest_step_that_any_survivor_committed(case):
    plan = plan_recovery(case.facts)
    if plan.verdict is Verdict.ROLLBACK:
        assert plan.target == case.facts.durable
    else:
        assert plan.target == target_of(case.facts)


@often
@given(CASES, st.data())
def test_nobody_goes_on_from_a_state_that_is_ahead_of_the_target(case, data):
    facts = case.facts
    target = target_of(facts)
    dense = [one for one in facts.processes if one.live.condition is Condition.DENSE]
    assume(target is not None and dense)
    ahead = data.draw(st.sampled_from(dense))
    live = LiveState(Condition.DENSE, target + data.draw(st.integers(1, 3)))
    again = changed(facts, {ahead.process: dataclasses.replace(ahead, live=live)})
    with pytest.raises(InconsistentFactsError):
        plan_recovery(again)


@settings(often, max_examples=200)
@given(CASES)
def test_as_many_stages_as_possible_keep_as_much_as_possible(case):
    plan = plan_recovery(case.facts)
    if plan.verdict not in REPLAYS or plan.is_from_durable:
        return
    starts = best_starts(case, plan.window)
    assert tuple(map(plan.start, range(case.facts.layout.pp))) == starts
    scope = {
        stage
        for stage, state in case.left.items()
        if state is None or state[1] is not None or starts[stage] < plan.target
    }
    assert set(plan.start_of) == scope
    for replay in plan.replays:
        state = case.left[replay.stage]
        kept = state is not None and state[0] == replay.start and state[1] in {None, plan.window}
        assert (replay.origin is Origin.KEPT) == kept
        assert replay.converts == (not kept or state[1] == plan.window)


@often
@given(CASES)
def test_the_window_is_the_newest_that_was_persisted_and_is_whole(case):
    facts = case.facts
    plan = plan_recovery(facts)
    if stands(case, case.left):
        assert plan.verdict is Verdict.RESUME
        assert plan.edges is WindowEdges.KEPT
        return
    whole = [
        window
        for window in persisted_windows(facts)
        if has_all(facts, window, first_slots(case, window, best_starts(case, window)))
    ]
    if whole:
        assert plan.verdict in REPLAYS
        assert plan.window == max(whole)
    elif stands(case, case.reached):
        assert (plan.verdict, plan.edges) == (Verdict.RESUME, WindowEdges.RESTARTED)
        assert plan.persisted is None
        assert plan.schedules.timetable.first_version == 1
    else:
        assert plan.window is None
        assert plan.is_from_durable == has_ledger(facts)
        assert plan.is_from_durable or plan.verdict is Verdict.ROLLBACK


def has_ledger(facts):
    """Returns whether somebody has the ledger of all steps since what is durable."""
    first, target = facts.durable + 1, target_of(facts)
    return first <= target and bool(with_ledger(facts, first, target))


@often
@given(CASES)
def test_every_rank_in_scope_loads_every_slot_it_waits_for_from_one_who_has_it(case):
    facts = case.facts
    plan = plan_recovery(facts)
    if plan.verdict not in REPLAYS or plan.is_from_durable:
        return
    starts = tuple(map(plan.start, range(facts.layout.pp)))
    needed = first_slots(case, plan.window, starts)
    assert loads_of(plan, facts) == needed


@often
@given(CASES)
def test_every_boundary_of_every_replayed_step_comes_from_a_log_or_a_neighbour(case):
    plan = plan_recovery(case.facts)
    served = {}
    for log in plan.logs:
        assert set(range(log.first, log.last + 1)) <= logged(case.facts, log.sender, log.direction)
        served[log.receiver, log.sender, log.direction] = set(range(log.first, log.last + 1))
    assert len(served) == len(plan.logs)
    for replay in plan.replays:
        for direction, sender in neighbours(case.facts.layout, replay.stage):
            live = set(range(plan.start(sender) + 1, plan.target + 1))
            replayed = set(range(replay.start + 1, plan.target + 1))
            from_log = served.pop((replay.stage, sender, direction), set())
            assert from_log == replayed - live
    assert not served


@often
@given(CASES)
def test_bystanders_hold_the_target_or_roll_forward_to_it(case):
    plan = plan_recovery(case.facts)
    if plan.verdict not in {Verdict.RESUME, *REPLAYS}:
        assert not plan.replays
        return
    rolling = {roll.rank: roll.step for roll in plan.roll_forward}
    for stage in set(range(case.facts.layout.pp)) - set(plan.start_of):
        for each in case.facts.stage(stage):
            assert each.live.condition is not Condition.TORN
            step = rolling.get(each.rank, each.live.step)
            assert step == plan.target
    for rank, step in rolling.items():
        live = case.facts.by_rank[rank].live
        assert (live.finished, live.step) == (step, step - 1)
        assert step == plan.start(rank.pp)


@often
@given(CASES)
def test_localized_leaves_a_bystander_and_global_leaves_none(case):
    plan = plan_recovery(case.facts)
    stages = case.facts.layout.pp
    if plan.verdict is Verdict.LOCALIZED:
        assert 0 < len(plan.start_of) < stages
    if plan.verdict is Verdict.GLOBAL:
        assert len(plan.start_of) == stages


@often
@given(first_faults(st.builds(Layout, dp=st.integers(1, 4), ep=st.integers(1, 2))))
def test_one_stage_is_never_localized(case):
    plan = plan_recovery(case.facts)
    assert plan.verdict is not Verdict.LOCALIZED
    if plan.verdict is Verdict.GLOBAL:
        assert ("one stage only" in plan.reason) != plan.is_from_durable


@often
@given(CASES)
def test_segments_are_the_runs_of_neighbours_that_replay(case):
    plan = plan_recovery(case.facts)
    layout = case.facts.layout
    in_order = [stage for segment in plan.segments for stage in segment]
    assert sorted(in_order) == sorted(plan.start_of)
    for segment in plan.segments:
        steps = {(after - before) % layout.pp for before, after in itertools.pairwise(segment)}
        assert steps <= {1}
        assert is_ring(layout) or list(segment) == sorted(segment)
    ends = {segment[-1] for segment in plan.segments}
    starts = {segment[0] for segment in plan.segments}
    if len(plan.segments) > 1:
        follows = {(end + 1) % layout.pp for end in ends if is_ring(layout) or end + 1 < layout.pp}
        assert not follows & starts


@often
@given(second_faults(st.builds(Layout, pp=st.integers(2, 5), chunks=st.integers(1, 2))))
def test_tied_ends_replay_the_same_steps(case):
    plan = plan_recovery(case.facts)
    if case.facts.ends is Ends.TIED:
        assert plan.start(0) == plan.start(case.facts.layout.pp - 1)


def survivable_losses(draw, job, facts):
    """Draws processes to lose such that a holder of each slot and a spare for each rank is left."""
    spares = sum(each.rank is None for each in facts.processes)
    window = max(learnt_windows(facts))
    copies = [
        holders(facts, rank, window, slot)
        for rank in job.layout.ranks
        for slot in range(window.size)
    ]
    assert {len(each) for each in copies} == {job.placement.replicas + 1}
    lost = set()
    for each in draw(st.permutations(facts.processes)):
        more = lost | {each.process}
        with_rank = [
            other.process
            for other in facts.processes
            if other.rank is not None and other.process not in more
        ]
        spares_left = spares - sum(
            other.rank is None for other in facts.processes if other.process in more
        )
        vacant = job.layout.num_ranks - len(with_rank)
        if with_rank and vacant <= spares_left and all(having - more for having in copies):
            lost = more
        if draw(st.booleans()):
            break
    return lost


@often
@given(jobs(), st.data())
def test_what_has_a_holder_and_a_spare_is_never_rolled_back(job, data):
    job = dataclasses.replace(job, behind=frozenset(), spares=max(job.spares, 1))
    facts = job.facts()
    if not learnt_windows(facts):
        return
    lost = survivable_losses(data.draw, job, facts)
    plan = plan_recovery(without_processes(facts, lost))
    assert plan.verdict in {Verdict.RESUME, *REPLAYS}
    assert plan.target == job.step
    assert plan.replayed_steps <= max_replayed_steps(job.window, job.lag)


@often
@given(CASES)
def test_the_ledger_comes_from_one_who_has_all_of_it(case):
    plan = plan_recovery(case.facts)
    first = min((replay.start for replay in plan.replays), default=plan.target)
    if plan.ledger_source is None:
        assert plan.verdict not in REPLAYS
        assert not plan.roll_forward
        return
    assert plan.ledger_source in with_ledger(case.facts, first + 1, plan.target)


@often
@given(CASES, st.data())
def test_another_copy_never_makes_a_plan_worse(case, data):
    plan = plan_recovery(case.facts)
    better = plan_recovery(data.draw(with_another_copy(case)))
    former, now = (GETTING_WORSE.index(kind_of(each)) for each in (plan, better))
    assert now <= former
    if plan.verdict in REPLAYS:
        for stage in range(case.facts.layout.pp):
            assert better.start(stage) >= plan.start(stage)


@often
@given(LAYOUTS, st.integers(1, 20))
def test_with_nothing_lost_nobody_replays(layout, step):
    plan = plan_recovery(Job(layout, step=step).facts())
    assert plan.verdict is Verdict.RESUME
    assert not plan.replays
    assert not plan.roll_forward
