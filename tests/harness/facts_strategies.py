# SPDX-License-Identifier: Apache-2.0
"""Strategies of hypothesis for facts: jobs that the protocol allows, with faults on top of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from megatron_moevement.policy.facts.facts import Condition, Facts, Holding, LogExtent
from megatron_moevement.policy.job.ranks import Layout, LogicalRank
from megatron_moevement.policy.job.segments import Ends
from megatron_moevement.policy.recovery.plan import Origin, Plan
from megatron_moevement.policy.recovery.recovery_planner import plan_recovery
from megatron_moevement.policy.window.schedule import Window
from tests.harness.job_facts import (
    Interrupt,
    Job,
    changed,
    interrupted,
    sent_ways,
    without_commit,
    without_log_steps,
    without_processes,
    without_slots,
)

Reached = tuple[int, Window | None] | None
"""What all ranks of a stage can go on from: k of the S_k, and the window that is still being
converted. None where a state is lost."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Facts, and what only somebody who saw everything knows.

    Attributes:
        job: as it was before the first fault.
        facts: what is published after the last one.
        reached: for each stage what is left of its state, read from the faults, not the facts.
    """

    job: Job
    facts: Facts
    reached: Mapping[int, Reached]

    @cached_property
    def left(self) -> Mapping[int, Reached]:
        """What is left of each stage's state: nothing where a slot in flight is nowhere.

        The state that such a slot captured has passed, so the window would never be whole.
        """
        held = {
            (each.owner, each.window.step_of(slot))
            for process in self.facts.processes
            for each in process.holdings
            for slot in range(each.window.size)
            if each.slots >> slot & 1
        }
        learnt = [each.persisted for each in self.facts.processes if each.persisted is not None]
        first = max(learnt).last + 1 if learnt else min((step for _, step in held), default=0)
        return {
            stage: state
            if state is not None
            and all(
                (rank, step) in held
                for rank in self.job.layout.stage_ranks(stage)
                for step in range(first, state[0])
            )
            else None
            for stage, state in self.reached.items()
        }


LAYOUTS = st.builds(
    Layout,
    pp=st.integers(1, 5),
    dp=st.integers(1, 2),
    tp=st.integers(1, 2),
    ep=st.integers(1, 2),
    chunks=st.integers(1, 2),
)


@st.composite
def jobs(draw: DrawFn, layouts: SearchStrategy[Layout] = LAYOUTS) -> Job:
    """Draws jobs at the moment of an interrupt: ranks are at most one step apart."""
    layout = draw(layouts)
    window, lag = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    step = draw(st.integers(0, 4 * window + lag))
    some = st.frozensets(st.sampled_from(layout.ranks))
    behind = draw(some) if step and draw(st.booleans()) else frozenset()
    return Job(
        layout,
        step=step - (len(behind) == layout.num_ranks),
        window=window,
        lag=lag,
        ends=draw(st.sampled_from(Ends)),
        replicas=draw(st.integers(0, 3)),
        spares=draw(st.integers(0, 4)),
        processes_per_domain=draw(st.integers(1, 2)),
        behind=behind if len(behind) < layout.num_ranks else frozenset(),
        ahead=frozenset() if behind else draw(some),
    )


@st.composite
def first_faults(draw: DrawFn, layouts: SearchStrategy[Layout] = LAYOUTS) -> Case:
    """Draws jobs that lost processes, commits, logs and slots; one rank at least survives."""
    job = draw(jobs(layouts))
    reached: dict[int, Reached] = dict.fromkeys(range(job.layout.pp), (job.step, None))
    case = _with_losses(draw, Case(job, job.facts(), reached))
    if draw(st.booleans()):
        torn = draw(st.sampled_from(case.facts.processes))
        lost = set() if torn.rank is None else {torn.rank.pp}
        facts = without_commit(case.facts, {torn.process})
        case = Case(job, facts, _without_stages(case.reached, lost))
    return _with_target(_with_damage(draw, case))


@st.composite
def second_faults(draw: DrawFn, layouts: SearchStrategy[Layout] = LAYOUTS) -> Case:
    """Draws jobs whose recovery from the loss of one process was cut by another fault."""
    job = draw(jobs(layouts.filter(lambda layout: layout.num_ranks > 1)))
    grown = max(job.step, job.window + job.lag + draw(st.integers(0, job.window)))
    job = dataclasses.replace(job, step=grown, spares=job.spares + 2, replicas=job.replicas + 1)
    lost = draw(st.sampled_from(job.layout.ranks))
    facts = without_processes(job.facts(), {job.layout.ranks.index(lost)})
    reached: dict[int, Reached] = dict.fromkeys(range(job.layout.pp), (job.step, None))
    case = _with_target(Case(job, facts, _without_stages(reached, {lost.pp})))
    case = draw(st.sampled_from([case, _with_damage(draw, case)]))
    plan = plan_recovery(case.facts)
    if plan.window is None:  # what is durable is no part of the drawn facts
        return case
    interrupt = Interrupt({}, draw(_subsets(case, plan)), draw(_subsets(case, plan)))
    for replay in plan.replays:
        twin = case.job.layout.pp - 1 - replay.stage
        tied = case.facts.ends is Ends.TIED and {replay.stage, twin} == {0, case.job.layout.pp - 1}
        step = draw(st.integers(replay.start, plan.target))
        step = interrupt.reached.get(twin, step) if tied else step
        interrupt = _cut_at(case.job.layout, interrupt, replay.stage, replay.start, step)
    reached = {
        stage: _reached_in(case, plan, interrupt, stage) for stage in range(case.job.layout.pp)
    }
    cut = Case(case.job, interrupted(case.facts, plan, interrupt), reached)
    faulty = draw(st.sampled_from([cut, _with_losses(draw, cut)]))
    return draw(st.sampled_from([faulty, _with_damage(draw, faulty)]))


def _subsets(case: Case, plan: Plan) -> SearchStrategy[frozenset[LogicalRank]]:
    ranks = [rank for rank in case.job.layout.ranks if rank.pp in plan.start_of]
    return st.just(frozenset[LogicalRank]()) | st.frozensets(st.sampled_from(ranks))


def _cut_at(layout: Layout, interrupt: Interrupt, stage: int, start: int, step: int) -> Interrupt:
    """Lets a stage reach a step: its first rank is not behind, and nobody waits once it replays."""
    ranks = layout.stage_ranks(stage)
    idle = ranks if step > start else ()
    return Interrupt(
        {**interrupt.reached, stage: step},
        interrupt.behind.difference(ranks[:1]),
        interrupt.waiting.difference(idle),
    )


def _reached_in(case: Case, plan: Plan, interrupt: Interrupt, stage: int) -> Reached:
    """Returns what is left of a stage's state when the execution of a plan was cut."""
    if stage not in plan.start_of:
        return (plan.target, None)
    assert plan.window is not None
    ranks = frozenset(case.job.layout.stage_ranks(stage))
    waiting = interrupt.waiting & ranks
    start, step = plan.start(stage), interrupt.reached[stage]
    origin = next(replay.origin for replay in plan.replays if replay.stage == stage)
    if origin is Origin.KEPT:
        former = case.reached[stage]
        assert former is not None
        window = former[1]
    elif waiting:
        first: Reached = (start, plan.window if start < plan.window.last else None)
        states = {first} if ranks - waiting else set[Reached]()
        states |= {_held_before(case.facts, rank) for rank in waiting}
        return states.pop() if len(states) == 1 else None
    else:
        window = plan.window
    laggards = waiting or (step > start and interrupt.behind & ranks)
    last = plan.window.last + bool(laggards)
    return (step, window if step < last else None)


def _held_before(facts: Facts, rank: LogicalRank) -> Reached:
    """Returns the state of a rank that was to go back: its finished gradients are gone by then."""
    live = facts.by_rank[rank].live
    return (live.step, None) if live.condition is Condition.DENSE else None


def _with_losses(draw: DrawFn, case: Case) -> Case:
    """Loses processes; a spare has no state. One process with a state survives."""
    facts = case.facts
    lost = draw(st.frozensets(st.sampled_from([each.process for each in facts.processes])))
    lost = lost if draw(st.booleans()) else frozenset(sorted(lost)[:2])
    knowing = [each.process for each in facts.processes if each.committed is not None]
    if lost.issuperset(knowing):
        lost -= {draw(st.sampled_from(knowing))}
    stages = {each.rank.pp for each in facts.processes if each.process in lost and each.rank}
    return Case(case.job, without_processes(facts, lost), _without_stages(case.reached, stages))


def _without_stages(reached: Mapping[int, Reached], lost: set[int]) -> dict[int, Reached]:
    return {stage: None if stage in lost else state for stage, state in reached.items()}


def _with_target(case: Case) -> Case:
    """Takes back the step that nobody who committed it survived."""
    committed = [each.committed for each in case.facts.processes if each.committed is not None]
    target = max(committed)
    reached = {
        stage: None if state is None else (target, None) for stage, state in case.reached.items()
    }
    return Case(case.job, case.facts, reached)


def _with_damage(draw: DrawFn, case: Case) -> Case:
    """Takes logs and slots whose checksums are wrong out of the facts."""
    facts = case.facts
    numbers = st.sampled_from([each.process for each in facts.processes])
    persisted = case.job.persisted_at(case.job.step)
    first = 1 if persisted is None else persisted.start + 1
    edges = st.sampled_from([{first}, {first + 1}, {case.job.step}])
    steps = edges | st.sets(st.integers(1, case.job.step + 1), min_size=1)
    for process in sorted(draw(st.frozensets(numbers, max_size=3))):
        facts = without_log_steps(facts, process, draw(steps))
    for process in sorted(draw(st.frozensets(numbers, max_size=2))):
        owner = draw(st.sampled_from(case.job.layout.ranks))
        facts = without_slots(facts, process, owner, draw(st.integers(1, 15)))
    return Case(case.job, facts, case.reached)


@st.composite
def with_another_copy(draw: DrawFn, case: Case) -> Facts:
    """Draws facts where one process has whole logs, or whole slots of some window, in addition."""
    facts, job = case.facts, case.job
    each = draw(st.sampled_from(facts.processes))
    if draw(st.booleans()) and each.rank is not None:
        steps = frozenset(range(1, job.step + 2))
        logs = tuple(LogExtent(way, steps) for way in sent_ways(job.layout, each.rank.pp))
        return changed(facts, {each.process: dataclasses.replace(each, logs=logs)})
    windows = {held.window for other in facts.processes for held in other.holdings}
    if not windows:
        return facts
    window = draw(st.sampled_from(sorted(windows)))
    owner = draw(st.sampled_from(job.layout.ranks))
    rest = [held for held in each.holdings if (held.owner, held.window) != (owner, window)]
    whole = Holding(owner, window, (1 << window.size) - 1)
    return changed(facts, {each.process: dataclasses.replace(each, holdings=(*rest, whole))})
