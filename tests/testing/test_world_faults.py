# SPDX-License-Identifier: Apache-2.0
"""Faults in a simulated job: how much is replayed, and what many faults in a row cost."""

import dataclasses
import itertools
import math
import random
import statistics
from collections import Counter

import pytest

from megatron_moevement.policy.copies.retention import max_log_steps, max_replayed_steps
from megatron_moevement.policy.copies.slot_ring import ring_capacity
from megatron_moevement.policy.job.ranks import Layout
from megatron_moevement.policy.recovery.plan import Schedules, Verdict, WindowEdges
from megatron_moevement.policy.recovery.recovery_planner import plan_start
from megatron_moevement.testing.campaign import Failure, play
from megatron_moevement.testing.mutations import mutation_named
from megatron_moevement.testing.world.faults import Fault, FaultKind
from megatron_moevement.testing.world.policies import Policies
from megatron_moevement.testing.world.scenario import Scenario
from megatron_moevement.testing.world.world import Outcome, World

LAG = 1
"""L with the default links: steps from a window's last capture to where it is persisted."""

CRASHES = 40
"""One in each of so many worlds."""


@dataclasses.dataclass
class Watched:
    """What was seen in a world that ran to its end.

    Attributes:
        outcome: how it went.
        commits: for each step the tick at which the first rank committed it.
        slots: the most slots of one rank that a process had at once.
        logs: the most steps that a process had in its log at once.
    """

    outcome: object = None
    commits: dict = dataclasses.field(default_factory=dict)
    slots: int = 0
    logs: int = 0


def watch(scenario):
    """Runs a world and looks at it whenever a rank may commit."""
    seen = Watched()

    world = World(scenario)
    execute = world.commits.execute

    def commit(process, run, section):
        seen.commits.setdefault(run.step, world.outcome.ticks)
        for each in world.live:
            owners = Counter(key.owner for key in each.store.slots)
            seen.slots = max(seen.slots, *owners.values(), 0)
            seen.logs = max(seen.logs, len(each.store.logs))
        return execute(process, run, section)

    world.commits.execute = commit
    seen.outcome = world.run()
    assert seen.outcome.aborted is None
    return seen


def crash(tick):
    """The process whose command it is dies."""
    return Fault(FaultKind.CRASH, tick)


def plans_after_one_crash(scenario):
    """Yields the plan after a crash, for crashes at times uniformly random over three windows."""
    draw = random.Random(scenario.window)
    commits = watch(scenario).commits
    times = range(commits[3 * scenario.window], commits[6 * scenario.window])
    for _ in range(CRASHES):
        faults = (crash(draw.choice(times)),)
        outcome = World(dataclasses.replace(scenario, faults=faults)).run()
        assert outcome.aborted is None
        assert set(outcome.lags) == {LAG}
        (plan,) = outcome.plans
        yield plan


@pytest.mark.parametrize("layout", [Layout(pp=3), Layout(pp=2, dp=2)], ids=["pp3", "pp2-dp2"])
@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_one_fault_costs_what_the_window_and_the_lag_say(window, layout):
    scenario = Scenario(1, layout, window=window, spares=2, steps=7 * window + 2)
    plans = list(plans_after_one_crash(scenario))
    assert {plan.verdict for plan in plans} == {Verdict.LOCALIZED}

    # The steps replayed depend on nothing but the place of the last committed step in its window.
    least = window - 1 + LAG
    for plan in plans:
        assert plan.replayed_steps == least + (plan.target - least) % window
        assert plan.replayed_steps <= 2 * window - 2 + LAG == max_replayed_steps(window, LAG)

    # All places are equally likely, so this is the mean; a sample's is three errors off at most.
    on_average = statistics.mean(least + place for place in range(window))
    assert on_average == 1.5 * (window - 1) + LAG
    found = statistics.mean(plan.replayed_steps for plan in plans)
    error = math.sqrt((window**2 - 1) / 12 / CRASHES)
    assert abs(found - on_average) <= 3 * error


def ten_faults(scenario):
    """Adds ten crashes, each 1 to W - 1 steps after the one before, at ever other commands."""
    window = scenario.window
    step = 2 * window + 1
    for place in range(10):
        commits = watch(scenario).commits
        half = (commits[step + 1] - commits[step]) // 2
        tick = commits[step] + 5 * place % half
        scenario = dataclasses.replace(scenario, faults=(*scenario.faults, crash(tick)))
        step = watch(scenario).outcome.plans[-1].target + 1 + place % (window - 1)
    return scenario


@pytest.mark.parametrize(
    ("window", "layout"),
    [
        (2, Layout(pp=3)),
        (3, Layout(pp=2, dp=2)),
        pytest.param(4, Layout(pp=4), marks=pytest.mark.slow),
        pytest.param(5, Layout(pp=3, ep=2), marks=pytest.mark.slow),
    ],
)
def test_ten_faults_within_a_window_of_each_other_pin_nothing(window, layout):
    first = Scenario(1, layout, window=window, spares=11, steps=10 * window)
    scenario = ten_faults(first)
    seen = watch(scenario)
    plans = seen.outcome.plans
    assert len(plans) == len(scenario.faults) == 10
    for before, after in itertools.pairwise(plans):
        assert 0 < after.target - before.target < window
    assert {plan.verdict for plan in plans} <= {Verdict.LOCALIZED, Verdict.GLOBAL}
    for plan in plans:
        assert plan.replayed_steps <= max_replayed_steps(window, LAG)
    assert seen.slots <= ring_capacity(window, scenario.lag)
    assert seen.logs <= max_log_steps(window, LAG)
    assert max(seen.commits) == scenario.steps


def test_faults_close_together_show_a_window_edge_that_moves():
    scenario = ten_faults(Scenario(1, Layout(pp=3), window=3, spares=11, steps=40))
    failure = play(scenario, mutation_named("window-edge-moved").policies)
    assert isinstance(failure, Failure)
    assert failure.what == "UnknownScheduleError", "the window is none of the moved ones"


def damaged_slots_and_false_alarms(scenario):
    """Yields the scenario with a slot that is damaged, noticed, and a second alarm soon after."""
    commits = watch(scenario).commits
    for tick in range(commits[1], commits[scenario.window], 7):
        for later in (40, 75):
            faults = (
                Fault(FaultKind.CORRUPT_SLOT, tick),
                Fault(FaultKind.FALSE_ALARM, tick + 1),
                Fault(FaultKind.FALSE_ALARM, tick + later),
            )
            yield dataclasses.replace(scenario, faults=faults)


def test_a_damaged_slot_costs_no_step_while_every_state_stands():
    scenario = Scenario(1, Layout(pp=2, dp=2), window=3, replicas=0, steps=15)
    edges = Counter()
    for each in damaged_slots_and_false_alarms(scenario):
        seen = watch(each)
        verdicts = {plan.verdict for plan in seen.outcome.plans}
        assert verdicts <= {Verdict.RESUME, Verdict.LOCALIZED, Verdict.GLOBAL}
        assert max(seen.commits) == scenario.steps
        edges.update(plan.edges for plan in seen.outcome.plans)
    assert edges[WindowEdges.RESTARTED] >= 10


def test_states_that_stand_are_missed_when_they_are_given_up():
    def gives_up(facts):
        plan = plan_start(facts)
        if plan is None or plan.edges is WindowEdges.KEPT:
            return plan
        return dataclasses.replace(plan, verdict=Verdict.ROLLBACK, target=0, rollbacks=1)

    scenario = Scenario(1, Layout(pp=2, dp=2), window=3, replicas=0, steps=15)
    worlds = damaged_slots_and_false_alarms(scenario)
    results = [play(each, Policies(plan_start=gives_up)) for each in worlds]
    assert "7 progress" in {each.what for each in results if isinstance(each, Failure)}


def test_a_job_that_goes_back_although_its_window_is_kept_loses_work():
    def goes_back(facts):
        plan = plan_start(facts)
        if plan is None or not plan.replays:
            return plan
        return dataclasses.replace(
            plan,
            verdict=Verdict.ROLLBACK,
            target=0,
            window=None,
            replays=(),
            copies=(),
            roll_forward=(),
            edges=WindowEdges.RESTARTED,
            schedules=Schedules(plan.schedules.timetable.restarted(0), plan.schedules.source),
        )

    job = Scenario(1, Layout(pp=3), window=2, replicas=1, steps=11)
    tick = watch(job).commits[8]
    lost = dataclasses.replace(job, faults=(Fault(FaultKind.CRASH, tick, 1),))
    assert isinstance(play(lost), Outcome)
    assert play(lost, Policies(plan_start=goes_back)).what == "7 lost work"
