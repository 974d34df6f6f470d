# SPDX-License-Identifier: Apache-2.0
"""Storage: what dead processes left in memory, or flushed, and durable checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from megatron_moevement.policy.copies.left_stores import NOTHING, age_of, of_no_use
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.recovery.newest_state import Durable
from megatron_moevement.testing.world.live import Live
from megatron_moevement.testing.world.process import Process
from megatron_moevement.testing.world.reference import initial_state
from megatron_moevement.testing.world.simulated_store import Store

if TYPE_CHECKING:
    from megatron_moevement.policy.copies.journal_state import JournalState
    from megatron_moevement.testing.world.world import World


SavedRank = tuple[Live, dict[int, int]]
"""A rank's part of a durable checkpoint: its state and the loss of every step so far."""


class Machines:
    """Where stores lie that belong to no live process."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._left: dict[int, Process] = {}
        self._flushed: dict[int, Store] = {}

    @property
    def stores(self) -> Iterator[Store]:
        """Everything that is there."""
        yield from (left.store for left in self._left.values())
        yield from self._flushed.values()

    @property
    def has_any(self) -> bool:
        """Whether there is anything; where not, nobody looks for it."""
        return bool(self._left or self._flushed)

    def _left_on(self, machine: str) -> dict[int, Store]:
        """Returns what lies in the memory of a machine, by who left it."""
        return {
            number: left.store for number, left in self._left.items() if left.machine == machine
        }

    def leave(self, process: Process) -> None:
        """Keeps the store of a process that is no more."""
        process.store.drop_unlanded(self._world.clock.now)
        if not process.store.is_empty:
            self._left[process.number] = process

    def lose(self, domain: str) -> None:
        """Forgets what lay in the memory of a failure domain."""
        self._left = {number: left for number, left in self._left.items() if left.domain != domain}

    def flush(self, process: Process) -> None:
        """Moves the store of a process to durable storage."""
        if not process.store.is_empty:
            self._flushed[process.number] = process.store
        process.store = Store()

    def open_store(self, process: Process, generation: int) -> None:
        """Opens the store of a process, and goes on with what lies there for it.

        It looks for the store of its rank once, when it first has one, so many restarts in place
        after the launch as `generation` says.
        """
        if not process.is_open:
            self._reopen(process)
        process.is_open = True
        if process.rank is None or process.has_looked:
            return
        process.has_looked = True
        if self._world.policies.adopts_in(generation, is_refused=False):
            self._adopt(process, process.rank)
        for key in process.store.slots:
            self._world.invariants.stored(process, key)

    def take_in(self, process: Process, generation: int) -> bool:
        """Brings what others left on a process's machine, or flushed, and nobody has adopted.

        A spare does so, too, where it keeps copies. Returns whether anything is new to the process.
        """
        policies, taken = self._world.policies, False
        if not policies.adopts_in(generation, is_refused=False):
            return taken
        for number, store in self._left_on(process.machine).items():
            if self._take_in(process, store):
                self._world.report(f"{process} takes in what p{number} left")
                del self._left[number]
                taken = True
        if process.rank is None:
            return taken
        ranks, flushed = self._world.shape.layout.ranks, self._flushed.items()
        named = {number: store.rank for number, store in flushed if store.committed is not None}
        for number in policies.share_of_flushed(named, process.rank, ranks):
            if self._take_in(process, self._flushed[number].copy()):
                self._world.report(f"{process} takes in what p{number} flushed")
                taken = True
        return taken

    def within_reach(self) -> Iterator[Store]:
        """Returns what live processes could go on with besides their own stores."""
        for machine in sorted({process.machine for process in self._world.live}):
            yield from self._left_on(machine).values()
        yield from self._flushed.values()

    def note_left(self, process: Process) -> None:
        """Notes what others left on a process's machine, now that all have opened their stores."""
        process.left_behind = frozenset(self._left_on(process.machine))

    def forget(self, process: Process) -> None:
        """Removes what the dead left on a process's machine, and all that was flushed."""
        gone = of_no_use(self._left_on(process.machine), process.left_behind)
        stores = [*(self._left[number].store for number in gone), *self._flushed.values()]
        if not stores:
            return
        self._world.invariants.work.forgets(process, stores)
        for number in gone:
            del self._left[number]
        self._flushed.clear()

    def _reopen(self, process: Process) -> None:
        """Opens the folder of the process that had the same number in a former launch."""
        for number, left in list(self._left.items()):
            if (left.machine, left.index) == (process.machine, process.index):
                del self._left[number]
                self._take(process, left.store)

    def _adopt(self, process: Process, rank: LogicalRank) -> None:
        rollbacks = process.store.rollbacks
        mine = _age(process.store, rank, rollbacks)
        there = self._left_on(process.machine).items()
        left = {number: _age(store, rank, rollbacks) for number, store in there}
        newest = max([mine, *left.values()])
        durable = max(
            (store for store in self._flushed.values() if _age(store, rank, rollbacks) > newest),
            key=lambda store: _age(store, rank, rollbacks),
            default=None,
        )
        if durable is not None:
            self._world.report(f"{process} brings back what was flushed")
            self._take(process, durable.copy())
            return
        for number, age in left.items():
            if age == newest != NOTHING:
                self._world.report(f"{process} adopts the store of p{number}")
                self._take(process, self._left.pop(number).store)

    def _take_in(self, process: Process, store: Store) -> bool:
        """Takes the slots that a process lacks, and the journal where it has none."""
        own = process.store
        if store.committed is None or (
            own.committed is not None and store.rollbacks != own.rollbacks
        ):
            return False
        if own.committed is None:
            slots, own.slots = own.slots, {}
            process.store = own = dataclasses.replace(store.copy(), slots=slots)
        lacking = [
            key
            for key in store.slots
            if key not in own.slots
            and not own.overwritten_by(key, store.slots[key].extent, process.ring.capacity)
        ]
        for key in lacking:
            own.slots[key] = store.slots[key]
            self._world.invariants.stored(process, key)
        return bool(lacking)

    def _take(self, process: Process, store: Store) -> None:
        """Goes on with a store; what is held for others stays, logs died with their process."""
        held, process.store = process.store.slots, store
        store.logs.clear()
        for key, stored in held.items():
            if not store.overwritten_by(key, stored.extent, process.ring.capacity):
                store.slots.setdefault(key, stored)


class Checkpoints:
    """Storage that survives everything."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._saved: dict[int, dict[LogicalRank, SavedRank]] = {
            0: {
                rank: (initial_state(world.history, world.shape, rank), {})
                for rank in world.shape.layout.ranks
            }
        }

    def save(self, process: Process) -> None:
        """Saves a rank's part; the checkpoint counts once every rank has saved its own."""
        parts = self._saved.setdefault(process.state.step, {})
        parts[process.place] = (process.state.copy(), dict(process.store.losses))

    @property
    def whole(self) -> Durable:
        """What could be loaded now."""
        ranks = len(self._world.shape.layout.ranks)
        saved = max(step for step, parts in self._saved.items() if len(parts) == ranks)
        return Durable(saved if self._world.scenario.loads else 0, saved)

    def begin_history(self, step: int) -> None:
        """Notes that a history begins: what an earlier one saved beyond it is not its own."""
        self._saved = {saved: parts for saved, parts in self._saved.items() if saved <= step}

    def load(self, step: int, rank: LogicalRank) -> SavedRank:
        """Returns a rank's part of a checkpoint."""
        live, losses = self._saved[step][rank]
        return live.copy(), dict(losses)


def _age(store: Store, rank: LogicalRank, rollbacks: int) -> tuple[int, int]:
    state = None if store.committed is None else cast("JournalState", store)
    return age_of(state, rank, rollbacks=rollbacks)
