"""Machines: what dead processes left in memory, or flushed, and who goes on with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_moevement.policy.adoption import NOTHING, age_of
from megatron_moevement.policy.ranks import LogicalRank
from megatron_moevement.testing.world.process import Process
from megatron_moevement.testing.world.store import Store

if TYPE_CHECKING:
    from megatron_moevement.testing.world.world import World


@dataclasses.dataclass(frozen=True)
class Left:
    """A store that lies in the memory of a machine without its process."""

    machine: str
    domain: str
    index: int
    store: Store


class Machines:
    """Where stores lie that belong to no live process."""

    def __init__(self, world: World) -> None:
        """Begins with nothing."""
        self._world = world
        self._left: dict[int, Left] = {}
        self._flushed: dict[int, Store] = {}

    @property
    def stores(self) -> Iterator[Store]:
        """Everything that is there."""
        yield from (left.store for left in self._left.values())
        yield from self._flushed.values()

    @property
    def has_flushed(self) -> bool:
        """Whether a launch finds something that was flushed."""
        return bool(self._flushed)

    def leave(self, process: Process) -> None:
        """Keeps the store of a process that is no more."""
        process.store.drop_unlanded(self._world.clock.now)
        if not process.store.is_empty:
            left = Left(process.machine, process.domain, process.index, process.store)
            self._left[process.number] = left

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

        It looks for the store of its rank once, when it first has one.

        Args:
            process: whose.
            generation: restarts in place so far.
        """
        if not process.is_open:
            self._reopen(process)
        process.is_open = True
        if process.rank is None or process.has_looked:
            return
        process.has_looked = True
        if self._world.policies.adopts_in(generation):
            self._adopt(process, process.rank)
        for key in process.store.slots:
            self._world.invariants.stored(process, key)

    def adoptable(self, process: Process) -> Iterator[Store]:
        """Returns what a process could go on with instead of its own store, or with it."""
        if process.rank is None or not process.is_new:
            return
        for left in self._left.values():
            if left.machine == process.machine and left.store.rank == process.rank:
                yield left.store
        for store in self._flushed.values():
            if store.rank == process.rank:
                yield store

    def note_left(self, process: Process) -> None:
        """Notes what others left on a process's machine, now that all have opened their stores."""
        process.left_behind = frozenset(
            number for number, left in self._left.items() if left.machine == process.machine
        )

    def forget(self, process: Process) -> None:
        """Removes what the dead left on a process's machine, and all that was flushed."""
        machine = process.machine
        left = [number for number, left in self._left.items() if left.machine == machine]
        gone = self._world.policies.of_no_use(left, process.left_behind)
        stores = [*(self._left[number].store for number in gone), *self._flushed.values()]
        if not stores:
            return
        self._world.invariants.left.forgets(process, stores)
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
        mine = _age(process.store, rank)
        left = {
            number: _age(each.store, rank)
            for number, each in self._left.items()
            if each.machine == process.machine
        }
        newest = max([mine, *left.values()])
        durable = max(
            (store for store in self._flushed.values() if _age(store, rank) > newest),
            key=lambda store: _age(store, rank),
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

    def _take(self, process: Process, store: Store) -> None:
        """Goes on with a store; what is held for others stays, logs died with their process."""
        held, process.store = process.store.slots, store
        store.logs.clear()
        for key, stored in held.items():
            if not store.overwritten_by(key, process.ring.capacity):
                store.slots.setdefault(key, stored)
        process.schedule = store.schedule or process.schedule


def _age(store: Store, rank: LogicalRank) -> tuple[int, int]:
    return age_of(None if store.committed is None else _State(store, store.committed), rank)


@dataclasses.dataclass(frozen=True)
class _State:
    """What the journal of a store says."""

    store: Store
    committed: int

    @property
    def era(self) -> int:
        return self.store.era

    @property
    def rank(self) -> LogicalRank | None:
        return self.store.rank
