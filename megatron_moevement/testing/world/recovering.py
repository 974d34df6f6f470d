"""Recovering: how a simulated process carries out the plan of its generation."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from megatron_moevement.policy.commit import EarlyState, Fate
from megatron_moevement.policy.facts import Facts, ProcessFacts
from megatron_moevement.policy.lifecycle import Event, event_of
from megatron_moevement.policy.persistence import SlotKey
from megatron_moevement.policy.plan import Origin, Plan, Verdict, WindowEdges
from megatron_moevement.policy.ring import SlotRing, ring_capacity
from megatron_moevement.testing.world.copying import FETCH_TIME, copy_states
from megatron_moevement.testing.world.live import Live
from megatron_moevement.testing.world.process import (
    Join,
    Pass,
    Process,
    Program,
    Run,
    Sleep,
    Until,
    Wait,
)
from megatron_moevement.testing.world.protecting import protect
from megatron_moevement.testing.world.store import StoredSlot
from megatron_moevement.testing.world.training import run_step, train

if TYPE_CHECKING:
    from megatron_moevement.testing.world.world import World

FACTS_TIME = 0.5
DURABLE_TIME = 4.0

Commands = Generator[Wait, Any, None]


def recover(world: World, process: Process, members: tuple[int, ...]) -> Program:
    """Gets a process from an interrupt back to training, or to its end."""
    plan = yield from _agree(world, process, members)
    yield from _share_ledger(world, process, plan)
    if plan.verdict is not Verdict.ABORT:
        _settle(world, process, plan)
    yield Pass()
    rolled = any(roll.rank == process.rank for roll in plan.roll_forward)
    if rolled and process.live is not None and process.live.torn:
        yield Until(lambda: False, "the restart")
    event = event_of(plan, process.rank)
    process.lifecycle = world.policies.advance(process.lifecycle, event)
    if plan.verdict is Verdict.ABORT:
        yield from _end(world, process, plan)
        return
    yield from _come_to_target(world, process, plan, members)
    yield Join(("replayed",), members, process.number, None, len)
    if event is not Event.LOADS:
        _go_on(world, process, plan)
    if event is Event.SERVES:
        process.lifecycle = world.policies.advance(process.lifecycle, Event.SERVED)
    yield from protect(world, process, members)
    if process.rank is None:
        process.lifecycle = world.policies.advance(process.lifecycle, Event.PROTECTED_SPARE)
        return
    process.lifecycle = world.policies.advance(process.lifecycle, Event.PROTECTED)
    world.invariants.resumed(process, plan)
    if process.live is not None and process.ring.next_step == process.live.step:
        world.commits.capture(process)
    yield from train(world, process)


def _come_to_target(
    world: World, process: Process, plan: Plan, members: tuple[int, ...]
) -> Commands:
    """Copies, loads or replays what the plan says."""
    if plan.copies:
        yield from copy_states(world, process, plan, members)
    event = event_of(plan, process.rank)
    if event is Event.LOADS:
        yield from _load(world, process, plan)
    elif event is Event.REPLAYS:
        yield from _fetch(world, process, plan)
        yield from _replay(world, process, plan)


def _agree(world: World, process: Process, members: tuple[int, ...]) -> Generator[Wait, Any, Plan]:
    """Publishes facts, makes the plan from everybody's, and compares it with the others'."""
    yield Sleep(FACTS_TIME)
    own = process.facts(world.shape, world.scenario.lost_states)
    published: dict[int, ProcessFacts] = yield Join(("facts",), members, process.number, own, dict)
    order = [number for number in published if number >= process.number]
    order += [number for number in published if number < process.number]
    facts = Facts(
        process.generation,
        world.shape.layout,
        world.shape.ends,
        world.restarts.durable_at(process.generation),
        tuple(published[number] for number in order),
    )
    plan = world.policies.plan_recovery(facts)
    digests: dict[int, str] = yield Join(("digest",), members, process.number, plan.digest, dict)
    world.invariants.agreed(process, facts, plan, digests)
    process.lifecycle = world.policies.advance(process.lifecycle, Event.AGREED)
    world.note_plan(plan)
    return plan


def _share_ledger(world: World, process: Process, plan: Plan) -> Commands:
    """Takes over the ledger before anything else: nobody knows the target alone any more.

    Only then a process counts the target as committed; the plan of a later generation may rely on
    any single survivor.
    """
    if plan.ledger_source is None:
        return
    source = world.processes[plan.ledger_source]
    if not source.alive:
        yield Until(lambda: False, "the restart")
    process.store.ledger.update(source.store.ledger)
    process.store.losses.update(source.store.losses)
    process.store.committed = plan.target


def _settle(world: World, process: Process, plan: Plan) -> None:
    """Rolls forward, or puts back what the interrupted step changed early."""
    run, live, store = process.run, process.live, process.store
    step = next((roll.step for roll in plan.roll_forward if roll.rank == process.rank), None)
    if plan.verdict is not Verdict.ROLLBACK:
        store.era = plan.era
        store.persisted = world.policies.newest_persisted(store.persisted, plan.persisted)
        if plan.window in {None, plan.persisted}:
            world.commits.drop(process)
        if process.schedule.epoch != plan.epoch and plan.ledger_source is not None:
            process.schedule = world.processes[plan.ledger_source].schedule
    if step is None:
        _forget_cut_capture(process)
    if run is not None and live is not None and not live.torn:
        if step == run.step and plan.ledger_source is not None:
            run.entry = world.processes[plan.ledger_source].store.ledger[step]
            run.plan = plan
            world.commits.execute(process, run, world.policies.roll_forward_section)
        else:
            _put_back(world, live, run)
    process.run = None
    if _gives_up(process, plan):
        process.live = None


def _forget_cut_capture(process: Process) -> None:
    """Makes room to capture the live state again, if its slot did not land or is damaged."""
    live, rank = process.live, process.rank
    process.capturing = None
    if live is None or rank is None or live.window is not None:
        return
    if process.ring.next_step == live.step + 1:
        key = process.store.own_slot(rank, live.step)
        if key is None or not process.store.slots[key].intact:
            process.ring = process.ring.rewound(live.step)


def _gives_up(process: Process, plan: Plan) -> bool:
    """Returns whether the state of a process is of no use: its gradients went with the reset."""
    if plan.verdict is Verdict.ROLLBACK:
        return True
    if process.rank is None:
        return False
    origins = {replay.stage: replay.origin for replay in plan.replays}
    return origins.get(process.rank.pp) is Origin.WINDOW


def _put_back(world: World, live: Live, run: Run) -> None:
    put_back = world.policies.put_back(Fate.REPEATED)
    if not run.saved_scalers:
        return
    if EarlyState.EXPERT_BIAS in put_back:
        live.bias = dict(run.saved_bias)
    for place, scaler in enumerate((EarlyState.DENSE_SCALER, EarlyState.EXPERT_SCALER)):
        if scaler in put_back:
            live.scalers[place] = run.saved_scalers[place]


def _end(world: World, process: Process, plan: Plan) -> Commands:
    if plan.is_flush:
        yield Sleep(FACTS_TIME)
        process.lifecycle = world.policies.advance(process.lifecycle, Event.FLUSHED)
    world.restarts.ended(process, plan.is_flush, plan.reason)


def _load(world: World, process: Process, plan: Plan) -> Commands:
    """Starts over from a durable checkpoint; nothing of the lost future may stay."""
    yield Sleep(DURABLE_TIME)
    store = process.store
    store.slots.clear()
    store.logs.clear()
    store.ledger.clear()
    store.losses.clear()
    store.persisted = None
    store.committed = None
    store.era = plan.era
    process.schedule = world.policies.schedule_after(plan, process.schedule)
    process.acknowledgements = type(process.acknowledgements)()
    process.capturing = None
    if process.rank is not None:
        saved = world.durable.load(plan.target, process.rank)
        process.live = saved.live
        store.losses.update(saved.losses)
        store.committed = plan.target
    process.ring = SlotRing(process.ring.capacity, plan.target, plan.target)
    process.lifecycle = world.policies.advance(process.lifecycle, Event.LOADED)


def _go_on(world: World, process: Process, plan: Plan) -> None:
    """Adopts the schedule that is then in force, once every rank holds the target.

    Where windows begin anew, the live state is kept and all else is dropped.
    """
    process.schedule = world.policies.schedule_after(plan, process.schedule)
    if plan.edges is WindowEdges.KEPT:
        return
    world.invariants.begins_anew(plan)
    process.store.slots.clear()
    process.store.logs.clear()
    process.store.ledger.clear()
    process.store.persisted = None
    process.capturing = None
    process.ring = SlotRing(process.ring.capacity, plan.target, plan.target)


def _fetch(world: World, process: Process, plan: Plan) -> Commands:
    """Brings the slots of the window into the own store, checked."""
    sources = next((each for each in plan.slots if each.rank == process.rank), None)
    assert plan.window is not None
    assert process.rank is not None
    origin = next(each.origin for each in plan.replays if each.stage == process.rank.pp)
    if sources is not None:
        for slot, source in enumerate(sources.processes, start=sources.first_slot):
            key = SlotKey(process.rank, plan.window, slot)
            if source != process.number:
                yield Sleep(FETCH_TIME)
                yield from _copy_slot(world, process, key, source)
            yield Pass()
    if origin is Origin.WINDOW:
        _rewind(world, process, plan)
    process.lifecycle = world.policies.advance(process.lifecycle, Event.FETCHED)


def _copy_slot(world: World, process: Process, key: SlotKey, source: int) -> Commands:
    holder = world.processes[source]
    if not holder.alive:
        yield Until(lambda: False, "the restart")
    stored = holder.store.slots.get(key)
    if stored is None or not stored.intact:
        world.report(f"{process} finds no intact {key} at {holder}")
        world.restarts.restart_soon()
        yield Until(lambda: False, "the restart")
    assert stored is not None
    process.store.slots[key] = StoredSlot(stored.content)
    world.invariants.stored(process, key)


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
    assert plan.window is not None
    window = plan.window
    start = plan.start(process.rank.pp)
    if process.live is not None and process.ring.next_step == process.live.step:
        world.commits.capture(process)
    for step in range(start + 1, plan.target + 1):
        yield from _activate(world, process, plan, step - 1)
        yield from run_step(world, process, Run(step, plan))
    yield from _activate(world, process, plan, plan.target)
    assert process.live is not None
    if process.live.window is not None and plan.target >= window.last:
        process.live.window = None
    world.invariants.replayed(process, plan)
    process.lifecycle = world.policies.advance(process.lifecycle, Event.REPLAYED)


def _activate(world: World, process: Process, plan: Plan, step: int) -> Commands:
    """Loads the slot of S_step, if the window has one and the state waits for it."""
    window = plan.window
    assert window is not None
    assert process.rank is not None
    live = process.live
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
