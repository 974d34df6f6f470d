# SPDX-License-Identifier: Apache-2.0
"""Restarts: launching a job, noticing losses, and beginning generations, with spares for ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megatron_moevement.policy.copies.placement import Host
from megatron_moevement.policy.copies.slot_ring import SlotRing
from megatron_moevement.policy.job.boundary import BoundaryTag, Direction
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.recovery.lifecycle import Phase
from megatron_moevement.policy.recovery.newest_state import Durable
from megatron_moevement.policy.window.popularity import Popularity
from megatron_moevement.policy.window.timetable import Timetable
from megatron_moevement.testing.world.process import Process, Receive, Until
from megatron_moevement.testing.world.recovering import end, recover
from megatron_moevement.testing.world.scheduling import Scheduling

if TYPE_CHECKING:
    from megatron_moevement.testing.world.world import World

DETECTION_TIME = 2.0
STAGGER_TIME = 1.5
LAUNCH_TIME = 5.0


@dataclasses.dataclass(frozen=True)
class Beginning:
    """What all processes of a generation see alike.

    Attributes:
        time: at which it began, on one clock for all.
        durable: what could be loaded.
        has_left: whether there is anything without a process; where not, nobody looks for it.
        members: numbers of its processes.
    """

    time: float
    durable: Durable
    has_left: bool
    members: tuple[int, ...]


class Restarts:
    """The restart wrapper and the launcher of a simulated job.

    Attributes:
        generation: of all launches.
        beginning: of this generation.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.generation = 0
        self._is_pending = False
        self._launches = 0
        self._domain_of: dict[LogicalRank, str] = {}
        self.beginning = Beginning(0.0, world.durable.whole, has_left=False, members=())
        self._relaunches_left = world.scenario.relaunches
        self._first_generation = 1

    @property
    def restarts_in_place(self) -> int:
        """Generations since the last launch."""
        return self.generation - self._first_generation

    def launch(self) -> None:
        """Starts the job."""
        world = self._world
        world.report(f"{self._create()} processes are launched: {world.scenario.summary}")

    def _create(self) -> int:
        """Creates a process for every logical rank, and spares; returns how many."""
        world = self._world
        spares = world.scenario.spares
        places: list[LogicalRank | None] = [*world.shape.layout.ranks, *[None] * spares]
        first = len(world.processes)
        nodes = [offset // world.scenario.processes_per_domain for offset in range(len(places))]
        if world.scenario.permuted and first:
            world.random.shuffle(nodes)
        for offset, rank in enumerate(places):
            domain = f"node{nodes[offset]}"
            world.processes[first + offset] = Process(
                first + offset,
                domain,
                rank,
                SlotRing(world.scenario.ring_capacity, world.scenario.lag),
                Timetable.begun(world.shape.schedule, 0),
                world.shape.schedule,
                acknowledgements=world.policies.acknowledgements(),
                machine="machine" if world.scenario.one_machine else domain,
                index=offset,
            )
            if rank is not None:
                self._domain_of[rank] = domain
        self._is_pending = True
        self._launches += 1
        self._first_generation = self.generation + 1
        world.clock.after(LAUNCH_TIME, self._interrupt_all, self._launches)
        return len(places)

    def kill(self, process: Process, keeps_memory: bool) -> None:
        """Lets a process die; with shared memory its store stays on the node."""
        world = self._world
        if not process.alive:
            return
        world.report(f"{process} dies, {process.phase.value}")
        process.alive = False
        self._stop(process)
        world.invariants.work.lost(process.domain)
        if keeps_memory:
            world.machines.leave(process)
        self.restart_soon()

    def stop(self, process: Process) -> None:
        """Ends what a process does; it lives, and everybody is interrupted."""
        self._stop(process)
        self.restart_soon()

    def restart_soon(self) -> None:
        """Notices, after a while, that something is wrong."""
        if not self._is_pending:
            self._is_pending = True
            delay = DETECTION_TIME * (1 + 3 * self._world.random.random())
            self._world.clock.after(delay, self._interrupt_all, self._launches)

    def awaited(self) -> Until:
        """Notices that something is wrong, and returns the wait for what comes of it."""
        self.restart_soon()
        return Until(lambda: False, "the restart")

    def _stop(self, process: Process) -> None:
        """Ends what a process executes; nothing of it stays."""
        if process.program is not None:
            process.program.close()
        process.program = None
        process.wait = None
        process.mailbox.clear()
        self._world.network.forget(process)

    def _interrupt_all(self, launch: int) -> None:
        """Interrupts every process, one after the other, and begins a generation."""
        world = self._world
        if launch != self._launches:
            return
        world.report("restart: everybody is interrupted")
        longest = 0.0
        for process in world.live:
            delay = STAGGER_TIME * world.random.random()
            longest = max(longest, delay)
            world.clock.after(delay, self._interrupt, process, self.generation + 1)
        world.clock.after(longest + 0.01, self._begin, launch)

    def _interrupt(self, process: Process, generation: int) -> None:
        world = self._world
        if process not in world.live:
            return
        self._let_run_on(process)
        self._stop(process)
        process.store.drop_unlanded(world.clock.now)
        process.damaged.clear()
        process.troubles.clear()
        known = Popularity(world.scenario.conditions.ordering)
        process.scheduling = Scheduling(known)
        process.phase, process.generation = Phase.PLANNING, generation

    def _let_run_on(self, process: Process) -> None:
        """Aborts what a process waits for: a stream may run on with garbage for a moment."""
        world, wait, run = self._world, process.wait, process.run
        if run is None or process.rank is None or world.random.random() < 0.5 or process.hung:
            return
        if isinstance(wait, Receive):
            garbage = world.history.of("garbage", process.number, run.step)
            for part in world.shape.parts[process.rank]:
                for direction, other in ((Direction.FORWARD, 1), (Direction.BACKWARD, -1)):
                    receiver = part.number + other
                    if 0 <= receiver <= world.shape.last_part:
                        tag = BoundaryTag(run.step, direction, part.number, receiver, 0)
                        stage = world.shape.part_stage(receiver)
                        late = 10 * world.random.random()
                        world.network.send_boundary(process, stage, tag, garbage, late)

    def _begin(self, launch: int) -> None:
        """Begins a generation with everybody who is left."""
        world = self._world
        if launch != self._launches:
            return
        for process in world.live:
            if process.hung:
                self.kill(process, keeps_memory=False)
        self._is_pending = False
        self.generation += 1
        live = world.live
        if not live:
            self._conclude("nobody is left")
            return
        world.network.forget_generation(self.generation)
        vacant = self._fill_ranks(live)
        world.invariants.generation_begins(self.generation, live)
        members = tuple(process.number for process in live)
        self.beginning = Beginning(
            world.clock.now, world.durable.whole, has_left=world.machines.has_any, members=members
        )
        for process in live:
            if vacant:
                process.program = end(world, process, f"no spare for {vacant[0]}")
            else:
                process.program = recover(world, process)
            world.clock.after(world.random.random(), world.resume, process)

    def _fill_ranks(self, live: list[Process]) -> list[LogicalRank]:
        """Lets spares take the lost ranks, and returns the ranks that find none."""
        world = self._world
        occupied = {process.rank for process in live}
        lost = {
            rank: self._domain_of[rank] for rank in world.shape.layout.ranks if rank not in occupied
        }
        assigned = assign_spares([process.host for process in live], lost)
        for rank, number in assigned.items():
            process = world.processes[number]
            process.rank = rank
            self._domain_of[rank] = process.domain
            world.report(f"{process} takes the rank")
        return sorted(lost.keys() - assigned.keys())

    def ended(self, reason: str) -> None:
        """Notes that a process ended; the last one ends the job."""
        if not self._world.live:
            self._conclude(reason)

    def _conclude(self, reason: str) -> None:
        """Launches the job again where something is left, and ends it otherwise."""
        self._launches += 1
        if self._world.machines.has_any and self._relaunches_left > 0:
            self._relaunches_left -= 1
            self._world.clock.after(LAUNCH_TIME, self.relaunch, self._launches)
            return
        self._world.report(f"the job ends: {reason}")
        self._world.outcome.aborted = reason
        self._world.is_over = True

    def relaunch(self, launch: int | None = None) -> None:
        """Starts the job again with new processes; the stores of former ones are left.

        It does nothing where another launch has followed that of number `launch`.
        """
        world = self._world
        if launch not in {None, self._launches}:
            return
        for process in world.live:
            self._stop(process)
            process.alive = False
            world.machines.leave(process)
        for process in world.processes.values():
            process.alive = False
        world.report("the job is launched again")
        self._create()


def assign_spares(
    hosts: Sequence[Host], lost: Mapping[LogicalRank, str]
) -> Mapping[LogicalRank, int]:
    """Gives lost logical ranks to spares; survivors keep theirs.

    A spare in the failure domain of the lost process comes first: it may adopt the store that was
    left there. Ranks that find no spare are missing from the result.

    Args:
        hosts: the live processes, in any order; those without a rank are spares.
        lost: for each logical rank without a process the domain of the one that it had.
    """
    spares = sorted((host for host in hosts if host.rank is None), key=lambda host: host.process)
    near: dict[LogicalRank, int] = {}
    for rank in sorted(lost):
        there = next((spare for spare in spares if spare.domain == lost[rank]), None)
        if there is not None:
            near[rank] = there.process
            spares.remove(there)
    others = (rank for rank in sorted(lost) if rank not in near)
    return near | {rank: spare.process for rank, spare in zip(others, spares, strict=False)}
