# SPDX-License-Identifier: Apache-2.0
"""Commits: the section that a restart can't interrupt, and what follows from a committed step."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Container, Iterable, Mapping, Set
from typing import TYPE_CHECKING

from megatron_moevement.policy.copies.commit import newest_persisted
from megatron_moevement.policy.copies.left_stores import may_forget_left
from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.copies.slot_ring import (
    Extent,
    RingFullError,
    ring_bytes,
)
from megatron_moevement.policy.recovery.lifecycle import Phase
from megatron_moevement.policy.watching.schedule_maker import noted
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.testing.world import arithmetic
from megatron_moevement.testing.world.counting import count
from megatron_moevement.testing.world.meter import UNIT_S
from megatron_moevement.testing.world.process import At, Commands, Process, Run
from megatron_moevement.testing.world.proposals import SCALARS_BYTES
from megatron_moevement.testing.world.scenario import Links
from megatron_moevement.testing.world.simulated_store import StoredSlot
from megatron_moevement.testing.world.step_model import Section

if TYPE_CHECKING:
    from megatron_moevement.testing.world.live import SlotContent
    from megatron_moevement.testing.world.world import World

CAPTURE_TIME = 0.6
SLOW_CAPTURE_TIME = 4.0


class Commits:
    """Executes commit sections, and captures what they leave."""

    def __init__(self, world: World) -> None:
        self._world = world

    def execute(self, process: Process, run: Run, section: Iterable[Section]) -> Commands:
        """Commits a step; faults may tear it, nothing else can interrupt it."""
        is_torn_here = self._world.faults.tears(process)
        process.state.torn = True
        yield At(FaultPoint.COMMIT)
        for part in section:
            if part is Section.OPTIMIZERS:
                yield from self._optimizers(process, run, is_torn_here)
            else:
                yield from self._step(process, run, part)
        process.run = None
        self._world.invariants.committed(process)
        if run.plan is None:
            yield At(FaultPoint.GATHER)
            every = self._world.scenario.durable_every
            if every and process.state.step % every == 0:
                yield At(FaultPoint.SAVE)
                self._world.durable.save(process)

    def _step(self, process: Process, run: Run, part: Section) -> Commands:
        live, store, entry, reduced = process.state, process.store, run.entry, run.reduced
        assert entry is not None
        assert reduced is not None
        match part:
            case Section.SCHEDULES:
                count(self._world, process, run)
                arithmetic.end_step(self._world.history, live, reduced, entry)
            case Section.LEDGER:
                yield At(FaultPoint.LEDGER)
                store.ledger[run.step] = entry
                store.bound_ledger(self._world.scenario.ledger_capacity)
                store.losses[run.step] = entry.loss
            case Section.COMMITTED:
                store.committed = max(store.committed or 0, run.step)
                store.rank = process.rank
                self._adopt(process, run)
                self._learn(process, run)
                if entry.popularity is not None:
                    process.scheduling.known = entry.popularity
                    self._world.invariants.schedules.counted(process, run)
                yield At(FaultPoint.COMMITTED)
            case Section.CAPTURE if live.window is None:
                yield from self.capture(process)
            case Section.PUBLISHED:
                live.torn = False

    def _adopt(self, process: Process, run: Run) -> None:
        """Writes down the schedules that are agreed on, with the one that the barrier told of."""
        store, agreed, world = process.store, run.agreed_schedule, self._world
        if agreed is not None:
            timetable = world.policies.adopts(process.timetable, agreed, run.step, process.place)
            process.timetable = timetable.known_from(run.step - world.scenario.ring_capacity)
            schedule = agreed.schedule
            store.schedules = {**store.schedules, schedule.digest: schedule}
            process.scheduling.proposed = None
            entry = timetable.newest
            world.invariants.adopted(process, entry)
            world.report(f"{process} takes over schedule {entry.schedule_version}")
        store.timetable = process.timetable
        news = noted(process.timetable, run.step, run.measured)
        if news is not None:
            process.scheduling.noted = news

    def _optimizers(self, process: Process, run: Run, is_torn_here: bool) -> Commands:
        live, entry, reduced = process.state, run.entry, run.reduced
        assert entry is not None
        assert reduced is not None
        operators, history = list(live.active), self._world.history
        half = len(operators) // 2
        arithmetic.apply_gradients(history, live, reduced, entry, operators[:half])
        if is_torn_here:
            self._world.report(f"{process} is torn in the commit of step {run.step}")
            yield self._world.restarts.awaited()
        yield At(FaultPoint.OPTIMIZERS)
        arithmetic.apply_gradients(history, live, reduced, entry, operators[half:])
        yield At(FaultPoint.AFTER_OPTIMIZERS)
        if run.plan is not None and process.phase is Phase.SETTLING:
            yield At(FaultPoint.ROLL_FORWARD)

    def _learn(self, process: Process, run: Run) -> None:
        """Takes over what the barrier told to be persisted, and drops what that makes garbage.

        Others may have left something: it goes once nothing of it can be needed any more.
        """
        former, agreed = process.store.persisted, run.agreed_persisted
        newest = newest_persisted(former, agreed)
        if newest != former:
            process.store.persisted = newest
            self._world.invariants.learnt(process, run.agreed_copies)
        if agreed is not None:
            process.acknowledgements = process.acknowledgements.dropped_before(agreed)
            self.drop_logs(process, agreed)
            kept = self._world.policies.retain(agreed, process.timetable.first_step)
            process.ring = process.ring.dropped_before(kept.oldest_slot_step)
        is_returning = process.phase is not Phase.TRAINING
        if process.has_left and may_forget_left(run.agreed_persisted, is_returning=is_returning):
            process.has_left = False
            self._world.machines.forget(process)

    def drop_logs(self, process: Process, window: Window) -> None:
        """Forgets what no replay from a window or a later one reads."""
        kept = self._world.policies.retain(window, process.timetable.first_step)
        process.store.drop_logs(kept.oldest_log_step)

    def make_room(self, process: Process, key: SlotKey, extent: Extent) -> None:
        """Forgets what lies where a slot is about to be written."""
        former = process.store.overwritten_by(key, extent, process.ring.capacity)
        self._world.invariants.drops(process, former, key)
        process.store.drop_slots(former)
        process.store.slots.pop(key, None)

    def make_room_for_copy(
        self, process: Process, owner: Process, key: SlotKey, accounted: Set[SlotKey]
    ) -> Extent:
        """Makes room for a copy of an owner's slot beside those of its others that stay.

        Where these have to move, all others go. The owner captures those again that come after all
        that it accounts for.

        Args:
            process: who gets it.
            accounted: slots that the owner accounts for.

        Returns:
            Where it lies.
        """
        store, extent = process.store, owner.store.slots[key].extent
        held = {other: lies for other, lies in store.slots.items() if other.owner == key.owner}
        stay = {other.step: lies for other, lies in held.items() if other in accounted - {key}}
        lie: Mapping[int, Extent] = {step: stored.extent for step, stored in stay.items()}
        former: set[SlotKey] = set()
        if any(extent.overlaps(there) for there in lie.values()):
            self._world.report(f"{process} moves what it has for {owner} together")
            room_bytes = self._room_bytes(owner)
            lie, extent = self._world.policies.moved_together(extent, lie, room_bytes)
            for step, stored in stay.items():
                stored.extent = lie[step]
            former = held.keys() - accounted - {key}
        former.update(store.overwritten_by(key, extent, process.ring.capacity))
        newest = max((other.step for other in accounted), default=key.step)
        relied = [other for other in former if other.step <= newest]
        self._world.invariants.drops(process, relied, key)
        store.drop_slots(former)
        store.slots.pop(key, None)
        return extent

    def capture_on(self, process: Process) -> Commands:
        """Captures the live state where the ring holds all slots before it, and only those."""
        if process.live is not None and process.ring.next_step == process.live.step:
            yield from self.capture(process)

    def capture(self, process: Process) -> Commands:
        """Starts the copy of S_step to the host; the optimizer of the next step waits for it."""
        live, rank, timetable = process.state, process.place, process.timetable
        schedule = process.schedule(timetable.at(live.step))
        key = SlotKey(rank, timetable.window_of(live.step), timetable.slot_of(live.step))
        if key.slot == 0:
            yield At(FaultPoint.WINDOW_EDGE)
        yield At(FaultPoint.CAPTURE)
        full, compute = self._world.policies.slot_contents(schedule, rank, key.slot)
        content = live.capture(self._world.history, full, compute)
        process.ring = process.ring.captured()
        extent = self.extent(process, key, content)
        self.make_room(process, key, extent)
        process.capturing = key
        self._world.invariants.captured(process, key, content)
        duration = CAPTURE_TIME
        if self._world.scenario.conditions.measures:
            work = self._world.link_times.capture(content)
            process.scheduling.meter.captured.append(work)
            duration = work.spent_s / UNIT_S
        if self._world.scenario.links is Links.SLOW:
            duration += SLOW_CAPTURE_TIME * self._world.random.random()
        now = self._world.clock
        now.after(duration / 2, self._pass_halfway, process, process.generation)
        slot = StoredSlot(content, extent)
        now.after(duration, self._land, process, process.generation, key, slot)

    def extent(self, process: Process, key: SlotKey, content: SlotContent) -> Extent:
        """Returns where a slot is captured to."""
        size_bytes = self._world.link_times.slot_bytes(content) + SCALARS_BYTES
        extents, room_bytes = process.store.extents(process.place), self._room_bytes(process)
        return self._world.policies.extent_of(key.step, size_bytes, extents, room_bytes)

    def place(
        self,
        process: Process,
        key: SlotKey,
        size_bytes: int,
        lay: Extent | None,
        needed: Container[int],
    ) -> Extent:
        """Returns where a slot comes to lie that lay elsewhere, beside those that are needed.

        Two layouts of a rank are rare: all who have its slots must be lost, a replica must give
        them, and one of the lost must come back. In some worlds a rank takes any of its slots as
        those of a replica at times.
        """
        scenario = self._world.scenario
        if scenario.layouts:
            named = f"layout {scenario.seed} {key.owner} {key.step} {process.generation}"
            lay = random.Random(named).choice((None, lay))  # noqa: S311
        extents = {
            step: there
            for step, there in process.store.extents(key.owner).items()
            if step in needed and step != key.step
        }
        place_of, room_bytes = self._world.policies.place_of, self._room_bytes(process)
        extent = place_of(key.step, size_bytes, lay, extents, room_bytes)
        for step, there in extents.items():
            if there.overlaps(extent):
                raise RingFullError(f"step {key.step} would take the room of step {step}")
        return extent

    def _room_bytes(self, process: Process) -> int:
        return ring_bytes(self._world.proposals.room(process.place), process.ring.lag)

    def _pass_halfway(self, process: Process, generation: int) -> None:
        if process.alive and process.generation == generation:
            self._world.faults.pass_by(process, FaultPoint.COPY)

    def _land(self, process: Process, generation: int, key: SlotKey, slot: StoredSlot) -> None:
        live, content = process.live, slot.content
        if not process.alive or process.generation != generation or live is None:
            return
        if live.step != key.step:
            torn = self._world.history.of("overwritten", key.step)
            content = dataclasses.replace(content, full=dict.fromkeys(content.full, torn))
        self._world.invariants.landed(process, key, content)
        self._world.faults.pass_by(process, FaultPoint.PUBLISH)
        if not process.alive:
            return
        process.store.slots[key] = dataclasses.replace(slot, content=content)
        process.capturing = None
        process.acknowledgements = process.acknowledgements.landed(key, process.holders)
        self._world.invariants.stored(process, key)
        self._world.faults.pass_by(process, FaultPoint.AFTER_PUBLISH)
        if not process.alive:
            return
        for holder in process.holders:
            self._world.replicator.send(process, key, holder)
        self._world.poke(process)
