# SPDX-License-Identifier: Apache-2.0
"""Fault injection: makes the faults of a scenario happen at their ticks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.testing.world.faults import Fault, FaultKind
from megatron_moevement.testing.world.process import Process

if TYPE_CHECKING:
    from megatron_moevement.testing.world.world import World

HANG_DETECTION_TIME = 25.0
HICCUP_TIMES = (1.0, 6.0, 40.0, 150.0)


class FaultInjection:
    """Strikes when the time has come."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._due = sorted(world.scenario.faults, key=lambda fault: fault.tick, reverse=True)
        self._armed: list[Fault] = []
        self._tears: set[int] = set()

    def strike(self, actor: Process) -> None:
        """Lets every fault happen that is due at this tick, the command of `actor`."""
        while self._due and self._due[-1].tick <= self._world.outcome.ticks:
            fault = self._due.pop()
            if fault.place is None:
                self._happen(fault, actor)
            else:
                self._armed.append(fault)

    def pass_by(self, actor: Process, place: FaultPoint) -> None:
        """Lets every fault happen that waits for a process to come to this place."""
        self._world.outcome.places.add(place)
        struck = [fault for fault in self._armed if fault.place is place]
        for fault in struck:
            self._armed.remove(fault)
            self._happen(fault, actor)

    def _happen(self, fault: Fault, actor: Process) -> None:
        victim = self._victim(fault, actor)
        where = "" if fault.place is None else f", {actor} being at {fault.place.value}"
        self._world.report(f"FAULT {fault.kind.value} at {victim}{where}")
        restarts = self._world.restarts
        match fault.kind:
            case FaultKind.CRASH:
                self._crash(victim)
            case FaultKind.EXCEPTION:
                restarts.stop(victim)
            case FaultKind.HANG:
                victim.hung = True
                self._world.clock.after(HANG_DETECTION_TIME, self._crash, victim)
            case FaultKind.HICCUP:
                lasts = HICCUP_TIMES[fault.tick % len(HICCUP_TIMES)]
                self._world.replicator.cut_off(victim, lasts)
            case FaultKind.NODE:
                self._node(victim)
            case FaultKind.TORN:
                self._tears.add(victim.number)
            case FaultKind.FALSE_ALARM:
                restarts.restart_soon()
            case FaultKind.CONTROL_STORE:
                restarts.relaunch()
            case FaultKind.CORRUPT_SLOT | FaultKind.CORRUPT_LOG:
                self._corrupt(victim, fault)

    def tears(self, process: Process) -> bool:
        """Returns, once, whether the commit that a process is in is to be torn."""
        due = process.number in self._tears
        self._tears.discard(process.number)
        return due

    def _victim(self, fault: Fault, actor: Process) -> Process:
        if fault.victim < 0:
            return actor
        live = self._world.live or [actor]
        return live[fault.victim % len(live)]

    def _crash(self, victim: Process) -> None:
        self._world.restarts.kill(victim, keeps_memory=self._world.scenario.shared_memory)

    def _node(self, victim: Process) -> None:
        for process in self._world.live:
            if process.domain == victim.domain:
                self._world.restarts.kill(process, keeps_memory=False)
        self._world.machines.lose(victim.domain)
        self._world.invariants.work.lost(victim.domain)

    def _corrupt(self, victim: Process, fault: Fault) -> None:
        invariants, slots = self._world.invariants, list(victim.store.slots.items())
        tensors = [tensor for step in victim.store.logs.values() for tensor in step.values()]
        if fault.kind is FaultKind.CORRUPT_SLOT and slots:
            key, stored = slots[-1 if fault.place else fault.tick % len(slots)]
            stored.intact = False
            invariants.damaged_slots.add((victim.number, key))
            invariants.work.lost(victim.domain)
        elif fault.kind is FaultKind.CORRUPT_LOG and tensors:
            tensors[fault.tick % len(tensors)].intact = False
            invariants.logs.damaged.add(victim.number)
