"""Fault injection: makes the faults of a scenario happen at their ticks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.testing.world.faults import Fault, FaultKind
from megatron_moevement.testing.world.process import Process

if TYPE_CHECKING:
    from megatron_moevement.testing.world.world import World

HANG_DETECTION_TIME = 25.0
HICCUP_TIMES = (1.0, 6.0, 40.0, 150.0)


class FaultInjection:
    """Strikes when the time has come.

    Attributes:
        passed: the places that processes came to.
    """

    def __init__(self, world: World) -> None:
        """Reads the faults of the world's scenario."""
        self._world = world
        self._due = sorted(world.scenario.faults, key=lambda fault: fault.tick, reverse=True)
        self._armed: list[Fault] = []
        self._tears: set[int] = set()
        self.passed: set[FaultPoint] = set()
        self._strikes: dict[FaultKind, Callable[[Process, Fault], None]] = {
            FaultKind.CRASH: self._crash,
            FaultKind.EXCEPTION: self._exception,
            FaultKind.HANG: self._hang,
            FaultKind.HICCUP: self._hiccup,
            FaultKind.NODE: self._node,
            FaultKind.TORN: self._tear,
            FaultKind.FALSE_ALARM: self._false_alarm,
            FaultKind.CORRUPT_SLOT: self._corrupt_slot,
            FaultKind.CORRUPT_LOG: self._corrupt_log,
            FaultKind.CONTROL_STORE: self._control_store,
        }

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
        self.passed.add(place)
        struck = [fault for fault in self._armed if fault.place is place]
        for fault in struck:
            self._armed.remove(fault)
            self._happen(fault, actor)

    def _happen(self, fault: Fault, actor: Process) -> None:
        victim = self._victim(fault, actor)
        where = "" if fault.place is None else f", {actor} being at {fault.place.value}"
        self._world.report(f"FAULT {fault.kind.value} at {victim}{where}")
        self._strikes[fault.kind](victim, fault)

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

    def _crash(self, victim: Process, _: Fault) -> None:
        self._world.restarts.kill(victim, keeps_memory=self._world.scenario.shared_memory)

    def _exception(self, victim: Process, _: Fault) -> None:
        self._world.restarts.stop(victim)

    def _hang(self, victim: Process, _: Fault) -> None:
        victim.hung = True
        self._world.clock.after(HANG_DETECTION_TIME, self._kill_hung, victim)

    def _kill_hung(self, victim: Process) -> None:
        if victim.alive:
            self._crash(victim, Fault(FaultKind.CRASH, 0))

    def _hiccup(self, victim: Process, fault: Fault) -> None:
        lasts = HICCUP_TIMES[fault.tick % len(HICCUP_TIMES)]
        self._world.replicator.cut_off(victim, lasts)

    def _node(self, victim: Process, _: Fault) -> None:
        for process in self._world.live:
            if process.domain == victim.domain:
                self._world.restarts.kill(process, keeps_memory=False)
        self._world.machines.lose(victim.domain)
        self._world.invariants.work.lost(victim.domain)

    def _tear(self, victim: Process, _: Fault) -> None:
        self._tears.add(victim.number)

    def _false_alarm(self, _: Process, __: Fault) -> None:
        self._world.restarts.restart_soon()

    def _corrupt_slot(self, victim: Process, fault: Fault) -> None:
        slots = list(victim.store.slots.items())
        if slots:
            key, stored = slots[-1 if fault.place else fault.tick % len(slots)]
            stored.intact = False
            self._world.invariants.damaged_slots.add((victim.number, key))
            self._world.invariants.work.lost(victim.domain)

    def _corrupt_log(self, victim: Process, fault: Fault) -> None:
        tensors = [tensor for step in victim.store.logs.values() for tensor in step.values()]
        if tensors:
            tensors[fault.tick % len(tensors)].intact = False
            self._world.invariants.logs.damaged.add(victim.number)

    def _control_store(self, _: Process, __: Fault) -> None:
        self._world.restarts.relaunch_from_memory()
