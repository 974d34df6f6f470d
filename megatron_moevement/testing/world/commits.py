"""Commits: the section that a restart can't interrupt, and what follows from a committed step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from megatron_moevement.policy.commit import Command
from megatron_moevement.policy.persistence import SlotKey
from megatron_moevement.testing.world import arithmetic
from megatron_moevement.testing.world.process import Process, Run
from megatron_moevement.testing.world.reference import scaler_of
from megatron_moevement.testing.world.scenario import Links
from megatron_moevement.testing.world.store import StoredSlot

if TYPE_CHECKING:
    from megatron_moevement.testing.world.live import SlotContent
    from megatron_moevement.testing.world.world import World

CAPTURE_TIME = 0.6
SLOW_CAPTURE_TIME = 4.0


class Commits:
    """Executes commit sections, and captures what they leave."""

    def __init__(self, world: World) -> None:
        """Acts on the processes of a world."""
        self._world = world

    def execute(self, process: Process, run: Run, section: Iterable[Command]) -> None:
        """Commits a step; a fault may tear it, nothing else can interrupt it."""
        torn = self._world.faults.tears(process)
        for command in section:
            self._step(process, run, command, torn)
            if torn and command is Command.OPTIMIZERS:
                assert process.live is not None
                process.live.torn = True
                self._world.report(f"{process} is torn in the commit of step {run.step}")
                self._world.restarts.restart_soon()
                return
        process.run = None
        if run.plan is None:
            self._learn(process, run)
            self._save_durably(process)
        assert process.live is not None
        if process.live.window is None or process.live.step > process.live.window.last:
            process.live.window = None
            self.capture(process)
        self._world.invariants.committed(process)

    def _step(self, process: Process, run: Run, command: Command, torn: bool) -> None:
        live, entry, store = process.live, run.entry, process.store
        assert live is not None
        assert entry is not None
        if command is Command.CLIP:
            run.clips += 1
        elif command is Command.OPTIMIZERS:
            self._optimizers(process, run, torn)
        elif command is Command.SCHEDULES:
            live.cursor = self._world.history.of("cursor", live.cursor)
        elif command is Command.LEDGER:
            store.ledger[run.step] = entry
            store.losses[run.step] = entry.loss
        elif command is Command.COMMITTED:
            live.step = run.step
            store.committed = max(store.committed or 0, run.step)

    def _optimizers(self, process: Process, run: Run, torn: bool) -> None:
        live, entry, reduced = process.live, run.entry, run.reduced
        assert live is not None
        assert entry is not None
        assert reduced is not None
        operators = list(live.active)
        for operator in operators[: len(operators) // 2] if torn else operators:
            which = scaler_of(operator)
            if not entry.found_inf[which]:
                live.active[operator] = arithmetic.apply_gradient(
                    self._world.history,
                    live.active[operator],
                    reduced.gradients[operator],
                    (run.scales[which], run.clips, entry.norm, run.step),
                )

    def _learn(self, process: Process, run: Run) -> None:
        """Takes over what the barrier told to be persisted, and drops what that makes garbage."""
        former = process.store.persisted
        newest = self._world.policies.newest_persisted(former, run.agreed_persisted)
        if newest != former:
            process.store.persisted = newest
            self._world.invariants.learnt(process)
            self.drop(process)

    def drop(self, process: Process) -> None:
        """Forgets everything that the newest persisted window makes garbage."""
        policies, store = self._world.policies, process.store
        kept = policies.retain(store.persisted, process.schedule.first_step)
        old = [key for key in store.slots if key.step < kept.oldest_slot_step]
        self._world.invariants.drops(process, old)
        store.drop_slots(old)
        process.ring = process.ring.dropped_before(kept.oldest_slot_step)
        if store.persisted is not None:
            process.acknowledgements = process.acknowledgements.dropped_before(store.persisted)
        if process.rank is not None:
            for direction in self._world.shape.directions[process.rank.pp]:
                oldest = policies.oldest_log_step(kept, process.rank.pp, direction)
                for step in [step for step in store.logs if step < oldest]:
                    tensors = store.logs[step]
                    for tag in [tag for tag in tensors if tag.direction is direction]:
                        del tensors[tag]
                    if not tensors:
                        del store.logs[step]
        for step in [step for step in store.ledger if step < kept.oldest_ledger_step]:
            del store.ledger[step]

    def capture(self, process: Process) -> None:
        """Starts the copy of S_step to the host; the optimizer of the next step waits for it."""
        live, rank, schedule = process.live, process.rank, process.schedule
        assert live is not None
        assert rank is not None
        assert process.ring.next_step == live.step
        window = schedule.window_of(live.step)
        key = SlotKey(rank, window, schedule.slot_of(live.step))
        full, compute = self._world.contents(schedule, rank, key.slot)
        content = live.capture(self._world.history, full, compute)
        process.ring = process.ring.captured()
        process.capturing = key
        self._world.invariants.captured(process, key, content)
        duration = CAPTURE_TIME
        if self._world.scenario.links is Links.SLOW:
            duration += SLOW_CAPTURE_TIME * self._world.random.random()
        self._world.clock.after(duration, self._land, process, process.generation, key, content)

    def _land(self, process: Process, generation: int, key: SlotKey, content: SlotContent) -> None:
        live = process.live
        if not process.alive or process.generation != generation or live is None:
            return
        if live.step != key.step:
            torn = self._world.history.of("overwritten", key.step)
            content = dataclasses.replace(content, full=dict.fromkeys(content.full, torn))
        self._world.invariants.landed(process, key, content)
        process.store.slots[key] = StoredSlot(content)
        process.capturing = None
        process.acknowledgements = process.acknowledgements.landed(key, process.holders)
        self._world.invariants.stored(process, key)
        for holder in process.holders:
            self._world.replicator.send(process, process, key, holder)
        self._world.poke(process)

    def _save_durably(self, process: Process) -> None:
        live = process.live
        assert live is not None
        every = self._world.scenario.durable_every
        if every and live.step % every == 0:
            self._world.durable.save(process)
