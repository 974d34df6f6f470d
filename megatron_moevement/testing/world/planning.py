# SPDX-License-Identifier: Apache-2.0
"""Planning: who keeps copies in a generation, and the plan that all its processes make alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from megatron_moevement.policy.copies.placement import HeldCopies, Placement, kept_placement
from megatron_moevement.policy.facts.facts import Facts, ProcessFacts
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.recovery.histories import next_rollbacks
from megatron_moevement.policy.recovery.lifecycle import Event
from megatron_moevement.policy.recovery.plan import Plan, Verdict, WindowEdges
from megatron_moevement.policy.recovery.recovery_planner import has_no_use_of_memory
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.testing.world.process import At, Commands, Process, Sleep, Wait

if TYPE_CHECKING:
    from megatron_moevement.testing.world.world import World

FACTS_TIME = 0.5


def agree_on_holders(world: World, process: Process) -> Commands:
    """Lets copies stay with the processes that hold them, and fills the gaps."""

    def combine(held: dict[int, dict[LogicalRank, int]]) -> Placement:
        hosts = [world.processes[number].host for number in sorted(held)]
        anew = world.policies.place_replicas(hosts, world.scenario.replicas)
        copies = HeldCopies()
        for number, ranks in held.items():
            for rank, step in ranks.items():
                copies.add(number, rank, step)
        return kept_placement(anew, hosts, copies)

    held = sorted(process.store.slots, key=lambda key: key.step)
    own = {key.owner: key.step for key in held if key.owner != process.store.rank}
    placement: Any = yield world.all_join(process, "started", value=own, combine=combine)
    process.acknowledgements = world.policies.acknowledgements()
    process.holders = ()
    if process.rank is not None:
        process.holders = placement.holders[process.rank]
        world.invariants.placed(process, world.restarts.beginning.members)


def agree(world: World, process: Process) -> Generator[Wait, Any, Plan]:
    """Publishes facts, makes the plan from everybody's, and compares it with the others'."""
    facts = yield from _look(world, process, 0)
    world.machines.note_left(process)
    beginning = world.restarts.beginning
    found = world.policies.plan_start(facts)
    if has_no_use_of_memory(found) and beginning.has_left:
        taken = world.machines.take_in(process, facts.generation)
        told = yield world.all_join(process, "taken", value=taken, combine=dict)
        if any(told.values()):
            facts = yield from _look(world, process, 1)
            found = world.policies.plan_start(facts)
    plan = dataclasses.replace(found or _beginning(facts), generation=process.generation)
    if plan.verdict is Verdict.ROLLBACK:
        rollbacks = next_rollbacks((each.rollbacks for each in facts.processes), beginning.time)
        plan = dataclasses.replace(plan, rollbacks=rollbacks)
        world.invariants.work.goes_back(plan)
    if found is None:
        world.durable.begin_history(plan.target)
    else:
        digests = yield world.all_join(process, "digest", value=plan.digest, combine=dict)
        world.invariants.agreed(process, facts, plan, digests)
    if plan.verdict is Verdict.ROLLBACK or plan.is_from_durable:
        process.advance(Event.LOADS)
    if found is not None:
        world.note_plan(plan)
    return plan


def _look(world: World, process: Process, time: int) -> Generator[Wait, Any, Facts]:
    """Publishes facts and returns everybody's, from the own process on."""
    yield Sleep(FACTS_TIME)
    yield At(FaultPoint.FACTS)
    own = process.facts(world.shape, world.scenario.lost_states)
    published: dict[int, ProcessFacts]
    published = yield world.all_join(process, "facts", time, value=own, combine=dict)
    order = sorted(published, key=lambda number: number < process.number)
    facts = Facts(
        world.restarts.restarts_in_place,
        world.shape.layout,
        world.shape.ends,
        0,
        tuple(published[number] for number in order),
    )
    newest = world.restarts.beginning.durable.newest(is_continuing=facts.is_continuing)
    return dataclasses.replace(facts, durable=newest)


def _beginning(facts: Facts) -> Plan:
    """Returns what is done without a plan: all load what is durable, and a history begins."""
    return Plan(
        facts.generation,
        Verdict.ROLLBACK,
        "nothing in memory is newer",
        facts.durable,
        edges=WindowEdges.RESTARTED,
    )
