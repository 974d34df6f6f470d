# SPDX-License-Identifier: Apache-2.0
"""Replays from the window before the persisted one, of which damage took a slot.

They log and capture more steps than any other replay, and more faults cut some of them short.
"""

import dataclasses
import random

import pytest

from megatron_moevement.policy.job.ranks import Layout
from megatron_moevement.testing.world.faults import Fault, FaultKind
from megatron_moevement.testing.world.scenario import Links, Scenario, ticks_per_step
from megatron_moevement.testing.world.world import World
from tests.harness.default_run import slow_but

WORLDS = 60
LAYOUTS = [Layout(pp=2), Layout(pp=3), Layout(pp=2, dp=2), Layout(dp=2), Layout(pp=4)]


def drawn(seed, window):
    """Returns a scenario of some crashes and alarms, the first after two windows."""
    draw = random.Random(seed)
    scenario = Scenario(
        seed,
        draw.choice(LAYOUTS),
        window=window,
        replicas=draw.choice([1, 1, 2]),
        spares=4,
        steps=4 * window + 3,
        links=draw.choice(list(Links)),
    )
    step = ticks_per_step(scenario)
    tick = draw.randrange(2 * window * step, (4 * window + 1) * step)
    faults = [Fault(FaultKind.CRASH, tick, draw.randrange(scenario.layout.num_ranks))]
    for _ in range(draw.randrange(3)):
        tick += draw.randrange(1, 2 * window * step)
        kind = draw.choice([FaultKind.CRASH, FaultKind.FALSE_ALARM])
        faults.append(Fault(kind, tick, draw.randrange(8)))
    return dataclasses.replace(scenario, faults=tuple(faults))


def damage_with_first_crash(world):
    """Lets the first loss of a rank damage all other copies of its slots of the newest window."""
    kill, damaged = world.restarts.kill, []

    def kill_and_damage(victim, *, keeps_memory):
        rank, invariants = victim.rank, world.invariants
        kill(victim, keeps_memory=keeps_memory)
        learnt = [each.store.persisted for each in world.live if each.store.persisted]
        if rank is None or not learnt or damaged:
            return
        for process in world.live:
            for key, stored in process.store.slots.items():
                if (key.owner, key.window) == (rank, max(learnt)):
                    stored.intact = False
                    damaged.append(key)
                    invariants.damaged_slots.add((process.number, key))
                    invariants.work.lost(process.domain)

    world.restarts.kill = kill_and_damage


@pytest.mark.parametrize("window", slow_but((1, 3, 5), (1, 2, 3, 5, 8)))
def test_there_is_always_room_and_the_job_ends(window):
    older = []
    for seed in range(WORLDS):
        world = World(drawn(seed, window))
        damage_with_first_crash(world)
        outcome = world.run()
        assert outcome.aborted is None
        plans = [plan for plan in outcome.plans if plan.window is not None]
        older += [plan for plan in plans if plan.window < plan.persisted]
    assert len(older) >= 3
    assert max(plan.replayed_steps for plan in older) >= 2 * window
    assert not any(plan.is_apart for plan in older)
