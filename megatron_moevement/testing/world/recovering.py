# SPDX-License-Identifier: Apache-2.0
"""Recovering: how a simulated process carries out the plan of its generation."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING

from megatron_moevement.policy.copies.commit import newest_persisted
from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.copies.placement import lacking_holders
from megatron_moevement.policy.recovery.lifecycle import Action, Event, Phase
from megatron_moevement.policy.recovery.plan import (
    Origin,
    Plan,
    RankPlan,
    SlotFetch,
    Verdict,
    WindowEdges,
)
from megatron_moevement.policy.recovery.slot_choice import fetches_in_order, held_steps
from megatron_moevement.policy.window.schedule import WindowSchedule
from megatron_moevement.policy.window.timetable import Timetable
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.testing.world.arithmetic import Entry
from megatron_moevement.testing.world.counting import recall
from megatron_moevement.testing.world.live import Live
from megatron_moevement.testing.world.planning import FACTS_TIME, agree, agree_on_holders
from megatron_moevement.testing.world.process import (
    At,
    Commands,
    Pass,
    Process,
    Run,
    Sleep,
    Until,
)
from megatron_moevement.testing.world.simulated_store import Store, StoredSlot
from megatron_moevement.testing.world.source_invariants import has_fetched
from megatron_moevement.testing.world.training import run_step, train

if TYPE_CHECKING:
    from megatron_moevement.testing.world.world import World

RESET_TIME = 0.5
FETCH_TIME = 0.6
COPY_TIME = 1.5
DURABLE_TIME = 4.0


def recover(world: World, process: Process) -> Commands:
    """Gets a process from the start of a generation to training, or to its end."""
    yield At(FaultPoint.CONNECT)
    yield At(FaultPoint.START)
    world.machines.open_store(process, world.restarts.restarts_in_place)
    yield from agree_on_holders(world, process)
    process.has_left = True
    plan = yield from agree(world, process)
    yield At(FaultPoint.PLAN)
    yield from Execution(world, process, plan).carry_out()
    if process.rank is None:
        return
    process.advance(Event.BEGINS)
    world.invariants.is_dense(process, plan.target)
    yield from world.commits.capture_on(process)
    yield from train(world, process)


def end(world: World, process: Process, why: str) -> Commands:
    """Ends a process that has nothing to train with: it writes what it has for the next launch."""
    yield Sleep(FACTS_TIME)
    world.machines.flush(process)
    process.phase = Phase.ENDING  # from wherever it was
    world.restarts.ended(why)


class Execution:
    """Carries out one plan on one process."""

    def __init__(self, world: World, process: Process, plan: Plan) -> None:
        self._world = world
        self._process = process
        self._plan = plan
        self._own = None if process.rank is None else plan.for_rank(process.rank)
        self._ledger: dict[int, Entry] = {}
        self._losses: dict[int, int] = {}
        self._loaded: Live | None = None
        self._schedules: Mapping[str, WindowSchedule] = {}
        self._timetable = plan.schedules.timetable or Timetable.begun(
            world.shape.schedule, plan.target
        )
        """That windows go on under."""

    def carry_out(self) -> Commands:
        """Brings the process to the target, and waits for all others."""
        process, plan = self._process, self._plan
        if plan.verdict is Verdict.ROLLBACK:
            yield from self._start_over()
            yield self._world.all_join(process, "replayed")
        else:
            if plan.is_from_durable:
                yield from self._load()
            yield At(FaultPoint.OPEN)
            yield from self._share()
            for action in self._world.policies.carrying_out:
                yield from self._settle(action)
            yield from recall(self._world, process)
            yield from self._go_on()
            yield self._world.all_join(process, "replayed")
            process.advance(Event.REACHED)
            if plan.edges is WindowEdges.RESTARTED and not plan.is_from_durable:
                self._restart_windows()
        yield from self._rejoin()

    def _settle(self, action: Action) -> Commands:
        """Does one of the actions that bring the process to the target, or to give its state up."""
        process, plan, own = self._process, self._plan, self._own
        match action:
            case Action.ROLL_FORWARD:
                yield from self._roll_forward()
            case Action.GIVE_UP if own is not None and plan.gives_up(own.rank.pp):
                process.live = None
            case Action.RESET:
                process.run = None
                yield Sleep(RESET_TIME * (1 + 9 * self._world.random.random()))
            case Action.JOURNAL:
                yield from self._write_journal()
            case Action.BELONG:
                process.is_new = process.is_new and own is None
            case Action.TAKE_LOADED if self._loaded is not None:
                process.live = self._loaded
            case Action.SETTLE:
                process.advance(Event.SETTLED)
                yield Pass()
            case _:
                yield from self._restore(action)

    def _restore(self, action: Action) -> Commands:
        """Does one of the actions that bring back what is lost; to stand by takes nothing here."""
        plan, own = self._plan, self._own
        match action:
            case Action.OFFER if plan.copies:
                yield self._world.all_join(self._process, "settled")
            case Action.FETCH if own is not None:
                yield from self._fetch_slots(own)
            case Action.COPY if own is not None and own.copied_from is not None:
                yield from self._copy_state(own.copied_from)
            case Action.AWAIT_ALL if plan.copies:
                yield self._world.all_join(self._process, "copied")

    def _start_over(self) -> Commands:
        """Loads a durable checkpoint; nothing of the lost future may stay."""
        world, process, plan = self._world, self._process, self._plan
        process.run, process.live = None, None
        yield At(FaultPoint.OPEN)
        yield Pass()
        yield Sleep(DURABLE_TIME)
        yield from self._learn_schedules()
        process.store = store = Store(rollbacks=plan.rollbacks)
        process.is_new = process.is_new and process.rank is None
        self._go_by_timetable()
        process.acknowledgements = world.policies.acknowledgements()
        process.capturing = None
        if process.rank is not None:
            process.live, store.losses = world.durable.load(plan.target, process.rank)
            store.committed = plan.target
        store.rank = process.rank
        process.ring = process.ring.holding(plan.target, plan.target)

    def _load(self) -> Commands:
        """Loads what is durable, to replay from."""
        process, start = self._process, self._plan.loaded
        assert start is not None
        process.run, process.live, process.capturing = None, None, None
        yield Sleep(DURABLE_TIME)
        if process.rank is not None:
            process.ring = process.ring.holding(start, start)
            self._loaded, _ = self._world.durable.load(start, process.rank)

    def _share(self) -> Commands:
        """Drops what is of no use, and takes the ledger of who has it: nobody has written it yet.

        Where windows begin at what is durable, the own ledger leads to the target, and stays.
        """
        world, process, plan = self._world, self._process, self._plan
        if plan.is_from_durable:
            yield from self._learn_schedules()
            self._go_by_timetable()
            if plan.edges is WindowEdges.RESTARTED:
                world.invariants.restarts_windows(plan)
                process.store.forget_windows()
                process.acknowledgements = world.policies.acknowledgements()
            yield world.all_join(process, "forgotten")
        process.advance(Event.AGREED)
        if process.store.rollbacks != plan.rollbacks:
            process.store = Store()  # of another history: its slots may have equal names
        yield world.all_join(process, "opened")
        own = None
        if process.number == plan.ledger_source:
            own = (dict(process.store.ledger), dict(process.store.losses))
        told = yield world.all_join(process, "ledger", value=own, combine=dict)
        self._ledger, self._losses = told.get(plan.ledger_source) or ({}, {})
        yield from self._learn_schedules()
        process.capturing = None

    def _learn_schedules(self) -> Commands:
        """Takes the schedules that all go on with from who has them, if they are not the first."""
        process, source = self._process, self._plan.schedules.source
        if self._timetable.digests() == {self._world.shape.schedule.digest}:
            return
        own = process.store.schedules if process.number == source else None
        told = yield self._world.all_join(process, "schedules", value=own, combine=dict)
        self._schedules = told.get(source) or {}

    def _go_by_timetable(self) -> None:
        """Has windows go on by the schedules of the plan, and writes them down."""
        self._process.timetable = self._process.store.timetable = self._timetable
        self._process.store.schedules = self._schedules

    def _roll_forward(self) -> Commands:
        world, process, plan = self._world, self._process, self._plan
        run, live = process.run, process.live
        for rolling in plan.roll_forward:
            if rolling.rank != process.rank or run is None or live is None or live.torn:
                continue
            if rolling.step == run.step:
                run.entry, run.plan = self._ledger[run.step], plan
                run.agreed_schedule = None  # it is in the timetable of the plan
                self._go_by_timetable()
                yield from world.commits.execute(process, run, world.policies.roll_forward_section)

    def _write_journal(self) -> Commands:
        """Makes the journal say what the job knows, step by step."""
        process, plan, store = self._process, self._plan, self._process.store
        self._go_by_timetable()
        store.rollbacks = plan.rollbacks
        for step in range((store.committed or 0) + 1, plan.target + 1):
            yield Pass()
            if step in self._ledger:
                store.ledger[step] = self._ledger[step]
                store.losses[step] = self._losses[step]
            store.committed = step
        store.ledger.update(self._ledger)
        store.losses.update(self._losses)
        store.committed = plan.target
        store.rank = process.rank
        if not plan.is_from_durable:
            store.persisted = newest_persisted(store.persisted, plan.persisted)
        store.bound_ledger(self._world.scenario.ledger_capacity)

    def _fetch_slots(self, own: RankPlan) -> Commands:
        """Brings the slots that the plan gives a rank into the own store, checked."""
        process = self._process
        held = held_steps(own, process.number, process.store.slots.__contains__)
        for fetch in fetches_in_order(own, held):
            yield Sleep(FETCH_TIME)
            yield from self._fetch(fetch, held)
            held.add(fetch.slot.step)
            yield Pass()
        has_fetched(process, own)

    def _fetch(self, fetch: SlotFetch, needed: Container[int]) -> Commands:
        """Takes a slot from the first of its sources that gives it, whichever replica it was of."""
        world, process = self._world, self._process
        own = fetch.slot._replace(owner=fetch.rank)  # a replica's slot becomes its own
        for source in fetch.sources:
            holder = world.processes[source]
            yield At(FaultPoint.SERVE_SLOT, source)
            stored = holder.store.slots.get(fetch.slot) if holder.alive else None
            if stored is not None and stored.intact:
                break
            world.report(f"{process} finds no intact {fetch.slot} at {holder}")
        else:
            yield world.restarts.awaited()
        assert stored is not None
        yield At(FaultPoint.FETCH)
        lay = stored.extent if fetch.slot == own else None  # a replica's ring may be another
        extent = world.commits.place(process, own, stored.extent.size_bytes, lay, needed)
        world.commits.make_room(process, own, extent)
        process.store.slots[own] = StoredSlot(stored.content, extent)
        world.invariants.stored(process, own)

    def _copy_state(self, number: int) -> Commands:
        """Takes the state of this process's rank from that of a replica."""
        world, process = self._world, self._process
        process.live, process.run, process.capturing = None, None, None
        yield Sleep(COPY_TIME)
        source = world.processes[number]
        yield At(FaultPoint.SERVE_STATE, number)
        if not source.alive or source.live is None:
            yield Until(lambda: False, "the restart")
        process.live = source.state.copy()
        world.invariants.logs.copied[process.number] = self._plan.target
        world.report(f"{process} copies the state of {source}")
        yield Pass()

    def _go_on(self) -> Commands:
        """Replays what the plan says, and sends holders what they lack."""
        process, plan, own = self._process, self._plan, self._own
        if own is None:
            process.advance(Event.STANDS_BY)
            return
        if plan.edges is WindowEdges.KEPT and not plan.is_from_durable:
            process.ring = process.ring.holding(own.oldest, own.next_step)
        if plan.gives_up(own.rank.pp):
            process.store.logs.clear()
        elif plan.persisted is not None:
            self._world.commits.drop_logs(process, plan.persisted)
        self._send_slots(own)
        if own.origin is None:
            process.advance(Event.STANDS_BY)
            return
        process.advance(Event.REPLAYS)
        if own.origin is Origin.WINDOW:
            self._rewind()
        yield from self._replay(own)

    def _send_slots(self, own: RankPlan) -> None:
        """Sends own slots to the holders that lack them."""
        world, process = self._world, self._process
        began_with = self._plan.holders.get(own.rank, ())
        for send in own.sends:
            lacking = lacking_holders(send.to, began_with, process.holders)
            having = set(process.holders).difference(lacking)
            acknowledgements = process.acknowledgements.landed(send.slot, lacking, having)
            process.acknowledgements = acknowledgements
            for holder in lacking:
                world.replicator.send(process, send.slot, holder)

    def _rewind(self) -> None:
        """Gives up the live state, and every own slot that the replay captures again."""
        process, window = self._process, self._plan.window
        assert window is not None
        process.live = process.capturing = None
        own = [key for key in process.store.slots if key.owner == process.rank]
        steps = range(window.start, window.last + 1)
        process.store.drop_slots(key for key in own if key.step not in steps)

    def _replay(self, own: RankPlan) -> Commands:
        """Converts the sparse window to a dense state and goes on to the target."""
        world, process, plan = self._world, self._process, self._plan
        if process.live is not None and own.converts:
            process.live.window = plan.window
        yield from world.commits.capture_on(process)
        for step in range(own.start + 1, plan.target + 1):
            yield from self._activate(step - 1)
            yield from run_step(world, process, Run(step, plan))
            yield At(FaultPoint.REPLAY)
        yield from self._activate(plan.target)
        world.invariants.replayed(process, plan)

    def _activate(self, step: int) -> Commands:
        """Loads the slot of S_step, if the window has one and the state waits for it."""
        world, process, window = self._world, self._process, self._plan.window
        live = process.live
        is_dense = live is not None and live.window is None
        if window is None or is_dense or not window.start <= step <= window.last:
            return
        stored = process.store.slots[SlotKey(process.place, window, step - window.start)]
        if not stored.intact:
            world.report(f"{process} finds its slot of step {step} damaged")
            yield world.restarts.awaited()
        schedule = process.schedule(world.policies.schedule_of(process.timetable, window))
        slot = step - window.start
        full, _ = world.policies.slot_contents(schedule, process.place, slot)
        world.invariants.put_back(process, window, slot, full)
        if live is None:
            process.live = live = Live.of_first_slot(stored.content, window, full)
        else:
            live.load(stored.content, full)
        if step == window.last:
            yield At(FaultPoint.DENSE)
            live.window = None

    def _restart_windows(self) -> None:
        """Keeps the live state and drops all else, once every rank holds it and windows restart."""
        process, target = self._process, self._plan.target
        self._world.invariants.restarts_windows(self._plan)
        process.store.forget_windows()
        process.store.ledger.clear()
        process.capturing = None
        process.ring = process.ring.holding(target, target)

    def _rejoin(self) -> Commands:
        """Waits for a copy of each slot of the guarded window, then for everybody."""
        process = self._process

        def is_protected() -> bool:
            guarded = None if self._own is None else self._own.guarded
            return guarded is None or process.acknowledgements.has_second_holder(guarded)

        if process.capturing is not None:
            yield Until(lambda: process.capturing is None, "the capture")
        yield At(FaultPoint.REPROTECT)
        yield Until(is_protected, "urgent copies")
        yield At(FaultPoint.REJOIN)
        yield self._world.all_join(process, "protected")
        yield self._world.all_join(process, "account")
