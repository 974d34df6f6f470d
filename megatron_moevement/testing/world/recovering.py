"""Recovering: how a simulated process carries out the plan of its generation."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.copies.slot_ring import SlotRing, ring_capacity
from megatron_moevement.policy.facts.facts import Facts, ProcessFacts
from megatron_moevement.policy.recovery.histories import next_rollbacks
from megatron_moevement.policy.recovery.lifecycle import Event, Phase
from megatron_moevement.policy.recovery.plan import Origin, Plan, Verdict, WindowEdges
from megatron_moevement.policy.recovery.planner import has_no_use_of_memory
from megatron_moevement.policy.window.schedule import WindowSchedule
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.testing.world.copying import copy_states, fetch_slots
from megatron_moevement.testing.world.live import Live
from megatron_moevement.testing.world.process import (
    At,
    Commands,
    Join,
    Pass,
    Process,
    Program,
    Run,
    Sleep,
    Until,
    Wait,
)
from megatron_moevement.testing.world.protecting import agree_on_holders, rejoin, send_slots
from megatron_moevement.testing.world.settling import settle
from megatron_moevement.testing.world.training import run_step, train

if TYPE_CHECKING:
    from megatron_moevement.testing.world.world import World

FACTS_TIME = 0.5
DURABLE_TIME = 4.0


def recover(world: World, process: Process, members: tuple[int, ...]) -> Program:
    """Gets a process from the start of a generation to training, or to its end."""
    yield At(FaultPoint.CONNECT)
    yield At(FaultPoint.START)
    world.machines.open_store(process, world.restarts.restarts_in_place)
    yield from agree_on_holders(world, process, members)
    process.has_left = True
    plan, schedule = yield from _agree(world, process, members)
    own = None if process.rank is None else plan.for_rank(process.rank)
    yield At(FaultPoint.PLAN)
    if plan.verdict is Verdict.ROLLBACK:
        process.run, process.live = None, None
    loaded = (yield from _load_again(world, process, plan)) if plan.is_from_durable else None
    yield At(FaultPoint.OPEN)
    if plan.is_from_durable:
        yield from _forget_windows(world, process, plan, schedule, members)
    if plan.verdict is not Verdict.ROLLBACK:
        process.advance(Event.AGREED)
        yield from settle(world, process, plan, schedule, members, loaded=loaded)
        process.advance(Event.SETTLED)
    yield Pass()
    yield from _come_to_target(world, process, plan, schedule, members)
    yield Join(("replayed",), members, process.number, None, len)
    if plan.verdict is not Verdict.ROLLBACK:
        process.advance(Event.REACHED)
        _go_on(world, process, plan)
    yield from rejoin(world, process, own, members)
    if process.rank is None:
        return
    process.advance(Event.BEGINS)
    world.invariants.resumed(process, plan)
    if process.live is not None and process.ring.next_step == process.live.step:
        yield from world.commits.capture(process)
    yield from train(world, process)


def _come_to_target(
    world: World,
    process: Process,
    plan: Plan,
    schedule: WindowSchedule,
    members: tuple[int, ...],
) -> Commands:
    """Copies, loads or replays what the plan says."""
    if plan.copies:
        yield Join(("settled",), members, process.number, None, len)
    yield from fetch_slots(world, process, plan)
    if plan.copies:
        yield from copy_states(world, process, plan, members)
    live = process.live
    is_kept = plan.edges is WindowEdges.KEPT and not plan.is_from_durable
    own = None if process.rank is None else plan.for_rank(process.rank)
    if is_kept and live is not None and own is not None:
        process.ring = SlotRing(process.ring.capacity, own.oldest, own.next_step)
    if own is not None:
        send_slots(world, process, own, dict(plan.holders).get(own.rank, ()))
    if plan.verdict is Verdict.ROLLBACK:
        yield from _load(world, process, plan, schedule)
    elif process.rank is not None and process.rank.pp in plan.start_of:
        process.advance(Event.REPLAYS)
        if plan.origin(process.rank.pp) is Origin.WINDOW:
            _rewind(world, process, plan)
        yield from _replay(world, process, plan)
    else:
        process.advance(Event.STANDS_BY)


def _agree(
    world: World, process: Process, members: tuple[int, ...]
) -> Generator[Wait, Any, tuple[Plan, WindowSchedule]]:
    """Publishes facts, makes the plan from everybody's, and compares it with the others'.

    Returns:
        The plan, and the schedule that windows go on under.
    """
    facts = yield from _look(world, process, members, 0)
    world.machines.note_left(process)
    beginning = world.restarts.beginning(process.generation)
    is_lacking = has_no_use_of_memory(_since_launch(world, facts))
    if is_lacking and beginning.has_left:
        taken = world.machines.take_in(process, world.restarts.restarts_in_place)
        told: dict[int, bool] = yield Join(("taken",), members, process.number, taken, dict)
        if any(told.values()):
            facts = yield from _look(world, process, members, 1)
    found = world.policies.plan_start(_since_launch(world, facts))
    if found is None:
        plan = _beginning(process, facts)
        world.durable.begin_history(plan.target)
        world.invariants.work.goes_back(plan)
    else:
        plan = dataclasses.replace(found, generation=process.generation)
        if plan.verdict is Verdict.ROLLBACK:
            world.invariants.work.goes_back(plan)
        digests: dict[int, str]
        digests = yield Join(("digest",), members, process.number, plan.digest, dict)
        world.invariants.agreed(process, facts, plan, digests)
    if plan.verdict is Verdict.ROLLBACK:
        rollbacks = next_rollbacks((each.rollbacks for each in facts.processes), beginning.time)
        plan = dataclasses.replace(plan, rollbacks=rollbacks)
        world.invariants.left.goes_back(plan)
    if plan.verdict is Verdict.ROLLBACK or plan.is_from_durable:
        process.advance(Event.LOADS)
    if found is not None:
        world.note_plan(plan)
    own = world.shape.schedule
    return plan, dataclasses.replace(
        own, schedule_version=plan.schedule_version, first_step=plan.windows_from
    )


def _look(
    world: World, process: Process, members: tuple[int, ...], time: int
) -> Generator[Wait, Any, Facts]:
    """Publishes facts and returns everybody's, from the own process on."""
    yield Sleep(FACTS_TIME)
    yield At(FaultPoint.FACTS)
    own = process.facts(world.shape, world.scenario.lost_states)
    name = ("facts", time)
    published: dict[int, ProcessFacts] = yield Join(name, members, process.number, own, dict)
    order = [number for number in published if number >= process.number]
    order += [number for number in published if number < process.number]
    is_continuing = world.restarts.restarts_in_place > 0 or any(
        each.committed is not None for each in published.values()
    )
    durable = world.restarts.beginning(process.generation).durable
    return Facts(
        process.generation,
        world.shape.layout,
        world.shape.ends,
        durable.newest(is_continuing=is_continuing),
        tuple(published[number] for number in order),
    )


def _since_launch(world: World, facts: Facts) -> Facts:
    """Returns facts whose generation counts from the launch, as production's do."""
    return dataclasses.replace(facts, generation=world.restarts.restarts_in_place)


def _beginning(process: Process, facts: Facts) -> Plan:
    """Returns what is done without a plan: all load what is durable, and a history begins."""
    return Plan(
        process.generation,
        Verdict.ROLLBACK,
        "nothing in memory is newer",
        facts.durable,
        edges=WindowEdges.RESTARTED,
        windows_from=facts.durable,
        schedule_version=max(each.schedule_version for each in facts.processes) + 1,
    )


def end(world: World, process: Process, why: str) -> Program:
    """Ends a process that has nothing to train with: it writes what it has for the next launch."""
    yield Sleep(FACTS_TIME)
    world.machines.flush(process)
    process.phase = Phase.ENDING  # from wherever it was
    world.restarts.ended(why)


def _load(world: World, process: Process, plan: Plan, schedule: WindowSchedule) -> Commands:
    """Starts over from a durable checkpoint; nothing of the lost future may stay."""
    yield Sleep(DURABLE_TIME)
    store = process.store
    store.forget_windows()
    store.ledger.clear()
    store.losses.clear()
    store.committed = None
    store.rollbacks = plan.rollbacks
    process.is_new = process.is_new and process.rank is None
    process.schedule = schedule
    process.acknowledgements = world.policies.acknowledgements()
    process.capturing = None
    if process.rank is not None:
        saved = world.durable.load(plan.target, process.rank)
        process.live = saved.live
        store.losses.update(saved.losses)
        store.committed = plan.target
    store.rank, store.schedule = process.rank, process.schedule
    process.ring = SlotRing(process.ring.capacity, plan.target, plan.target)


def _go_on(world: World, process: Process, plan: Plan) -> None:
    """Keeps the live state and drops all else, once every rank holds it and windows begin anew."""
    if plan.is_from_durable or plan.edges is WindowEdges.KEPT:
        return
    world.invariants.restarts_windows(plan)
    process.store.forget_windows()
    process.store.ledger.clear()
    process.capturing = None
    process.ring = SlotRing(process.ring.capacity, plan.target, plan.target)


def _forget_windows(
    world: World,
    process: Process,
    plan: Plan,
    schedule: WindowSchedule,
    members: tuple[int, ...],
) -> Commands:
    """Gets ready for windows from what is durable on; the ledger leads to the target, and stays."""
    process.schedule = schedule
    process.store.schedule = process.schedule
    if plan.edges is WindowEdges.RESTARTED:
        world.invariants.restarts_windows(plan)
        process.store.forget_windows()
        process.acknowledgements = world.policies.acknowledgements()
    yield Join(("forgotten",), members, process.number, None, len)


def _load_again(world: World, process: Process, plan: Plan) -> Generator[Wait, Any, Live | None]:
    """Returns what is durable, to replay from; None for a spare."""
    process.run, process.live, process.capturing = None, None, None
    yield Sleep(DURABLE_TIME)
    if process.rank is None:
        return None
    process.ring = SlotRing(process.ring.capacity, plan.windows_from, plan.windows_from)
    return world.durable.load(plan.windows_from, process.rank).live


def _rewind(world: World, process: Process, plan: Plan) -> None:
    """Gives up the live state, and every own slot that the replay captures again."""
    assert plan.window is not None
    window = plan.window
    process.live = None
    process.capturing = None
    capacity = ring_capacity(world.scenario.window, world.scenario.lag)
    process.ring = SlotRing(capacity, window.start, window.last + 1)
    again = [
        key
        for key in process.store.slots
        if key.owner == process.rank and (key.step > window.last or key.step < window.start)
    ]
    process.store.drop_slots(again)


def _replay(world: World, process: Process, plan: Plan) -> Commands:
    """Converts the sparse window to a dense state and goes on to the target."""
    assert process.rank is not None
    own = plan.for_rank(process.rank)
    if process.live is not None and own.converts:
        process.live.window = plan.window
    if process.live is not None and process.ring.next_step == process.live.step:
        yield from world.commits.capture(process)
    for step in range(own.start + 1, plan.target + 1):
        yield from _activate(world, process, plan, step - 1)
        yield from run_step(world, process, Run(step, plan))
        yield At(FaultPoint.REPLAY)
    yield from _activate(world, process, plan, plan.target)
    assert process.live is not None
    world.invariants.replayed(process, plan)


def _activate(world: World, process: Process, plan: Plan, step: int) -> Commands:
    """Loads the slot of S_step, if the window has one and the state waits for it."""
    window = plan.window
    assert process.rank is not None
    live = process.live
    if window is None:
        return
    if not window.start <= step <= window.last or (live is not None and live.window is None):
        return
    stored = process.store.slots[SlotKey(process.rank, window, step - window.start)]
    if not stored.intact:
        world.report(f"{process} finds its slot of step {step} damaged")
        world.restarts.restart_soon()
        yield Until(lambda: False, "the restart")
    if live is None:
        process.live = Live.of_first_slot(stored.content, window)
    else:
        live.load(stored.content)
    if step == window.last:
        yield At(FaultPoint.DENSE)
        assert process.live is not None
        process.live.window = None
