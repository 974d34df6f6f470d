"""Restarts: launching a job, noticing losses, and beginning generations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_moevement.policy.boundary import BoundaryTag, Direction
from megatron_moevement.policy.commit import Abort
from megatron_moevement.policy.lifecycle import Event
from megatron_moevement.policy.ranks import LogicalRank
from megatron_moevement.policy.ring import SlotRing, ring_capacity
from megatron_moevement.testing.world.process import Join, Process, Receive
from megatron_moevement.testing.world.recovering import recover
from megatron_moevement.testing.world.reference import initial_state
from megatron_moevement.testing.world.store import Store
from megatron_moevement.testing.world.training import train

if TYPE_CHECKING:
    from megatron_moevement.testing.world.world import World

DETECTION_TIME = 2.0
STAGGER_TIME = 1.5
LAUNCH_TIME = 5.0


class Restarts:
    """The restart wrapper and the launcher of a simulated job."""

    def __init__(self, world: World) -> None:
        """Acts on the processes of a world."""
        self._world = world
        self.generation = 0
        self._is_pending = False
        self._launches = 0
        self._left: dict[LogicalRank, tuple[str, Store]] = {}
        self._domain_of: dict[LogicalRank, str] = {}
        self._durable: dict[int, int | None] = {}
        self._relaunches_left = world.scenario.relaunches
        self._flushed: list[Process] = []

    def launch(self) -> None:
        """Starts the job at S_0."""
        world = self._world
        self._create(world.scenario.spares)
        world.report(f"{len(world.processes)} processes are launched: {world.scenario.summary}")
        hosts = [process.host for process in world.live]
        placement = world.policies.place_replicas(hosts, world.scenario.replicas)
        for process in world.live:
            if process.rank is None:
                process.lifecycle = world.policies.advance(process.lifecycle, Event.STARTED_SPARE)
                continue
            process.lifecycle = world.policies.advance(process.lifecycle, Event.STARTED)
            process.holders = placement.holders[process.rank]
            process.live = initial_state(world.history, world.shape, process.rank)
            process.store.committed = 0
        for process in world.live:
            if process.rank is not None:
                world.invariants.placed(process, world.processes)
                world.commits.capture(process)
                process.program = train(world, process)
                world.clock.after(world.random.random(), world.resume, process)

    def _create(self, spares: int) -> None:
        """Creates a process for every logical rank, and spares."""
        world = self._world
        capacity = ring_capacity(world.scenario.window, world.scenario.lag)
        places: list[LogicalRank | None] = [*world.shape.layout.ranks, *[None] * spares]
        first = len(world.processes)
        for offset, rank in enumerate(places):
            domain = f"node{offset // world.scenario.processes_per_domain}"
            number = first + offset
            ring = SlotRing(capacity)
            process = Process(number, domain, rank, ring, world.shape.schedule)
            world.processes[number] = process
            if rank is not None:
                self._domain_of[rank] = domain

    def kill(self, process: Process, keeps_memory: bool) -> None:
        """Lets a process die; with shared memory its store stays on the node."""
        world = self._world
        if not process.alive:
            return
        world.report(f"{process} dies, {process.lifecycle.phase.value}")
        process.alive = False
        self._stop(process)
        if process.rank is not None:
            self._left.pop(process.rank, None)
            if keeps_memory:
                process.store.drop_unlanded(world.clock.now)
                self._left[process.rank] = (process.domain, process.store)
        self.restart_soon()

    def lose_memory_of(self, domain: str) -> None:
        """Forgets the stores that dead processes left on a node."""
        self._left = {rank: left for rank, left in self._left.items() if left[0] != domain}

    def restart_soon(self) -> None:
        """Notices, after a while, that something is wrong."""
        if not self._is_pending:
            self._is_pending = True
            delay = DETECTION_TIME * (1 + 3 * self._world.random.random())
            self._world.clock.after(delay, self._interrupt_all, self._launches)

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
        process.abort = Abort.NONE
        process.lifecycle = world.policies.advance(process.lifecycle, Event.INTERRUPTED, generation)

    def _let_run_on(self, process: Process) -> None:
        """Aborts what a process waits for: a stream may run on with garbage for a moment."""
        world, wait, run = self._world, process.wait, process.run
        if run is None or process.rank is None or world.random.random() < 0.5 or process.hung:
            return
        process.abort = Abort.SEEN
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
        elif isinstance(wait, Join) and wait.name[0] == "barrier":
            world.resume(process, (run.step, {}))

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
        self._fill_ranks(live)
        world.invariants.generation_begins(self.generation, live)
        self._durable[self.generation] = world.durable.newest
        members = tuple(process.number for process in live)
        for process in live:
            process.program = recover(world, process, members)
            world.clock.after(world.random.random(), world.resume, process)

    def _fill_ranks(self, live: list[Process]) -> None:
        """Lets spares take the lost ranks, and adopt the stores that were left on their nodes."""
        world = self._world
        occupied = {process.rank for process in live}
        lost = {
            rank: self._domain_of[rank] for rank in world.shape.layout.ranks if rank not in occupied
        }
        assigned = world.policies.assign_spares([process.host for process in live], lost)
        for rank, number in assigned.items():
            process = world.processes[number]
            process.rank = rank
            self._domain_of[rank] = process.domain
            left = self._left.pop(rank, None)
            world.report(f"{process} takes the rank")
            if left is not None and left[0] == process.domain:
                self._adopt(process, left[1])

    def _adopt(self, process: Process, left: Store) -> None:
        """Goes on with a store that another process left; what it holds for others stays too."""
        held = process.store.slots
        process.store = left
        process.store.slots.update(held)
        for key in process.store.slots:
            self._world.invariants.stored(process, key)

    def durable_at(self, generation: int) -> int | None:
        """Returns the newest durable checkpoint as everybody in a generation sees it."""
        return self._durable[generation]

    def ended(self, process: Process, is_flushed: bool, reason: str) -> None:
        """Notes that a process ended; the last one ends the job."""
        if is_flushed:
            self._flushed.append(process)
        if not self._world.live:
            self._conclude(reason)

    def _conclude(self, reason: str) -> None:
        """Launches the job again where something was written, and ends it otherwise."""
        self._launches += 1
        if self._flushed and self._relaunches_left > 0:
            self._relaunches_left -= 1
            flushed = list(self._flushed)
            self._world.clock.after(LAUNCH_TIME, self._launch_again, flushed, self._launches)
            return
        self._end(reason)

    def _end(self, reason: str) -> None:
        self._world.report(f"the job ends: {reason}")
        self._world.outcome.aborted = reason
        self._world.is_over = True

    def relaunch_from_memory(self) -> None:
        """Ends in-process restart: all processes exit and a launch adopts their stores."""
        self._relaunch(self._world.live)

    def _launch_again(self, former: list[Process], launch: int) -> None:
        if launch == self._launches:
            self._relaunch(former)

    def _relaunch(self, former: list[Process]) -> None:
        """Starts the job again with new processes and the stores of former ones."""
        world = self._world
        former = [process for process in former if process.alive]
        for process in [*world.live, *former]:
            self._stop(process)
            process.alive = False
            process.store.drop_unlanded(world.clock.now)
        self._left.clear()
        self._flushed.clear()
        world.report("the job is launched again")
        self._create(world.scenario.spares)
        new = list(world.live)
        by_rank = {process.rank: process for process in former if process.rank is not None}
        idle = [process for process in former if process.rank is None]
        for process in new:
            process.lifecycle = world.policies.advance(
                process.lifecycle,
                Event.STARTED_SPARE if process.rank is None else Event.STARTED,
            )
            left = by_rank.get(process.rank) if process.rank else None
            if process.rank is None and idle:
                left = idle.pop()
            if left is not None:
                process.schedule = left.schedule
                self._adopt(process, left.store)
        self._is_pending = True
        self._launches += 1
        world.clock.after(LAUNCH_TIME, self._interrupt_all, self._launches)
