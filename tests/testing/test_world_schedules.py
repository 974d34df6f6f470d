# SPDX-License-Identifier: Apache-2.0
"""Simulated jobs choose their schedules as real ones do: by the worst link, and by all tokens."""

import dataclasses

import pytest

from megatron_moevement.policy.job.ranks import Layout
from megatron_moevement.policy.watching.window_choice import Reason
from megatron_moevement.policy.window.ordering import Ordering
from megatron_moevement.testing.world.conditions import Conditions, Cores, LinkSpeed
from megatron_moevement.testing.world.faults import Fault, FaultKind
from megatron_moevement.testing.world.scenario import Scenario
from megatron_moevement.testing.world.world import World

JOB = Scenario(seed=1, layout=Layout(pp=1, dp=4), window=1, spares=1, steps=60)
FAST, SLOW, TOO_SLOW = 400, 55, 33
"""Percent of a rank's state that is sent to a holder in an iteration."""


def run(speeds=(), limits=None, burden_percent=0, *, cores=Cores.IDLE, **changes):
    """Returns a world whose job has ended."""
    conditions = Conditions(
        limits, speeds=tuple(speeds), burden_percent=burden_percent, cores=cores
    )
    world = World(dataclasses.replace(JOB, conditions=conditions, **changes))
    world.run()
    assert world.finished
    return world


def windows_of(world):
    return [entry.window for entry in world.outcome.schedules]


def last_reason(world):
    """Returns what the last choice of W says."""
    return world.processes[0].scheduling.choice.reason


@pytest.mark.parametrize("rank", [-1, 0, 3])
def test_a_link_that_becomes_slower_is_a_stall_and_then_a_larger_w(rank):
    speeds = [LinkSpeed(0, -1, FAST), LinkSpeed(20, rank, SLOW)]
    slowed = run(speeds, (1, 4))
    assert windows_of(slowed)
    assert min(windows_of(slowed)) > 1
    assert "stalls" in slowed.outcome.reasons
    assert last_reason(slowed) is Reason.FITS
    assert last_reason(run(speeds, (1, 1))) is Reason.NO_WINDOW_FITS


@pytest.mark.parametrize("faults", [(), (Fault(FaultKind.CRASH, 6_000, 1),)])
def test_a_link_too_slow_for_any_w_ends_without_stalls_by_empty_slots(faults):
    speeds = [LinkSpeed(0, -1, FAST), LinkSpeed(12, -1, TOO_SLOW)]
    world = run(speeds, (1, 4), faults=faults)
    assert windows_of(world) == [4]
    assert world.outcome.reasons == {"no window fits", "empty slots"}
    assert last_reason(world) is Reason.FITS
    assert bool(world.outcome.plans) is bool(faults)


def test_a_link_that_becomes_faster_lowers_w():
    speeds = [LinkSpeed(0, -1, SLOW), LinkSpeed(8, -1, FAST)]
    world = run(speeds, (1, 4), window=3)
    assert windows_of(world) == [2, 1]
    assert world.outcome.reasons == {"slack"}


@pytest.mark.parametrize(("burden_percent", "windows"), [(0, [2, 1]), (1, [2, 1]), (10, [2, 1, 3])])
@pytest.mark.parametrize("faults", [(), (Fault(FaultKind.CRASH, 1_500, 1),)])
def test_a_w_that_takes_too_much_from_training_is_given_up(burden_percent, windows, faults):
    world = run([LinkSpeed(0, -1, FAST)], (1, 4), burden_percent, window=3, faults=faults)
    assert windows_of(world) == windows
    assert ("costs" in world.outcome.reasons) == (len(windows) > 2)


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("time", range(4_000, 7_500, 250))
def test_a_trial_goes_on_after_a_restart_whoever_is_lost(process, time):
    """The first process chooses; W = 1 is in force from step 35 on, or on its way."""
    faults = (Fault(FaultKind.CRASH, time, process),)
    world = run([LinkSpeed(0, -1, FAST)], (1, 4), 10, window=3, faults=faults, steps=80)
    assert windows_of(world) == [2, 1, 3]
    assert world.outcome.reasons == {"slack", "costs"}
    assert len(world.outcome.plans) == 1


@pytest.mark.parametrize(
    ("first", "burden_percent", "windows"),
    [(3, 0, [2, 1]), (3, 1, [2, 1]), (3, 10, []), (1, 10, [3])],
)
@pytest.mark.parametrize("faults", [(), (Fault(FaultKind.CRASH, 6_000, 1),)])
def test_a_w_that_would_take_too_many_cores_from_training_is_not_tried(
    first, burden_percent, windows, faults
):
    speeds = [LinkSpeed(0, -1, FAST)]
    world = run(speeds, (1, 4), burden_percent, cores=Cores.TAKEN, window=first, faults=faults)
    assert windows_of(world) == windows
    assert ("costs" in world.outcome.reasons) == (first == 1)


@pytest.mark.parametrize(("first", "windows"), [(3, [2, 1]), (1, [])])
def test_busy_cores_that_training_does_not_wait_for_keep_no_w_large(first, windows):
    world = run([LinkSpeed(0, -1, FAST)], (1, 4), 10, cores=Cores.YIELDED, window=first)
    assert windows_of(world) == windows
    assert "costs" not in world.outcome.reasons


def test_one_rank_with_a_slow_link_keeps_w_large():
    speeds = [LinkSpeed(0, -1, FAST), LinkSpeed(0, 2, SLOW)]
    assert windows_of(run(speeds, (1, 4), window=4)) == []


@pytest.mark.parametrize("faults", [(), (Fault(FaultKind.CRASH, 1_500, 1),)])
def test_tokens_that_go_to_other_experts_change_the_order(faults):
    conditions = Conditions(ordering=Ordering.HARD, routings=(20, 40))
    job = dataclasses.replace(JOB, seed=3, layout=Layout(pp=1, ep=2), window=2, experts_per_rank=4)
    world = World(dataclasses.replace(job, conditions=conditions, faults=faults))
    world.run()
    assert world.finished
    assert set(windows_of(world)) == {2}
    first_steps = [entry.first_step for entry in world.outcome.schedules]
    assert any(20 < step < 30 for step in first_steps)
    assert any(40 < step < 50 for step in first_steps)
    assert bool(world.outcome.plans) is bool(faults)
