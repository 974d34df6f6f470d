"""The replicator: copies of slots on their way to holders, over links that lose and damage."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from megatron_moevement.policy.persistence import SlotKey
from megatron_moevement.policy.placement import Placement
from megatron_moevement.testing.world.process import Process
from megatron_moevement.testing.world.scenario import Links
from megatron_moevement.testing.world.store import StoredSlot

if TYPE_CHECKING:
    from megatron_moevement.testing.world.world import World

COPY_TIME = 0.5
ACKNOWLEDGE_TIME = 0.1
RETRY_TIME = 2.0
ATTEMPTS = 3
_SLOWNESS = {Links.DEFAULT: 1.0, Links.LOSSY: 1.5, Links.SLOW: 14.0}
_LOSS = {Links.DEFAULT: 0.0, Links.LOSSY: 0.15, Links.SLOW: 0.02}


@dataclasses.dataclass(frozen=True)
class Parcel:
    """One copy on its way.

    Attributes:
        source: who sends it.
        owner: the process whose rank's state it is; it gets the acknowledgement.
        key: what is copied.
        target: number of the process that gets it.
        sent_in: the generation in which it was sent.
        attempt: how often it was sent before.
    """

    source: Process
    owner: Process
    key: SlotKey
    target: int
    sent_in: int
    attempt: int = 0


class Replicator:
    """Moves slots between processes and sees to it that they arrive."""

    def __init__(self, world: World) -> None:
        """Acts on the processes of a world."""
        self._world = world

    def send(self, source: Process, owner: Process, key: SlotKey, target: int) -> None:
        """Sends a copy of a slot; it is sent again until it is acknowledged."""
        self._ship(Parcel(source, owner, key, target, source.generation))

    def _ship(self, parcel: Parcel) -> None:
        draw = self._world.random
        links = self._world.scenario.links
        delay = COPY_TIME * _SLOWNESS[links] * (1 + draw.random() * 0.4)
        fails = draw.random() < _LOSS[links]
        self._world.clock.after(delay, self._arrive, parcel, fails)

    def _arrive(self, parcel: Parcel, fails: bool) -> None:
        """Ends a transfer: lost, cut, refused by its checksum, late, or stored."""
        world, source = self._world, parcel.source
        target = world.processes[parcel.target]
        stored = source.store.slots.get(parcel.key)
        if not source.alive and world.random.random() < 0.5:
            return
        if not target.alive:
            return
        if not world.policies.is_current(parcel.sent_in, target.generation):
            return
        if stored is not None and not stored.intact:
            world.report(f"{source} finds its slot of step {parcel.key.step} damaged")
            world.restarts.restart_soon()
            return
        if fails or target.hung or stored is None:
            if source.alive and source.generation == parcel.sent_in and stored is not None:
                world.clock.after(RETRY_TIME, self._retry, parcel)
            return
        self._take_along(target, parcel)
        target.store.slots[parcel.key] = StoredSlot(stored.content)
        world.invariants.stored(target, parcel.key)
        world.poke(source)
        delay = ACKNOWLEDGE_TIME * (1 + world.random.random())
        world.clock.after(delay, self._acknowledge, parcel)

    def _take_along(self, target: Process, parcel: Parcel) -> None:
        """Takes over what travels with a slot: what a lost rank would take with it.

        A spare hears of no barrier: it learns from the copies what is committed, what is persisted
        and what it may forget. A rank forgets what the owner forgot already.
        """
        owner, store = parcel.owner.store, target.store
        if target.rank is not None:
            oldest = parcel.owner.ring.oldest
            whose = parcel.key.owner
            old = [key for key in store.slots if key.owner == whose and key.step < oldest]
            self._world.invariants.drops(target, old)
            store.drop_slots(old)
            return
        store.ledger.update(owner.ledger)
        store.losses.update(owner.losses)
        if owner.committed is not None:
            store.committed = max(store.committed or 0, owner.committed)
        persisted = self._world.policies.newest_persisted(store.persisted, owner.persisted)
        if persisted != store.persisted:
            store.persisted = persisted
            self._world.commits.drop(target)

    def _acknowledge(self, parcel: Parcel) -> None:
        owner = parcel.owner
        if not owner.alive:
            return
        if not self._world.policies.is_current(parcel.sent_in, owner.generation):
            return
        owner.acknowledgements = owner.acknowledgements.acknowledged(parcel.key, parcel.target)
        self._world.invariants.acknowledged(owner, parcel.key, parcel.target)
        self._world.poke(owner)

    def _retry(self, parcel: Parcel) -> None:
        source = parcel.source
        if not source.alive or source.generation != parcel.sent_in:
            return
        if parcel.key not in source.store.slots:
            return
        again = dataclasses.replace(parcel, attempt=parcel.attempt + 1)
        owing = parcel.owner.acknowledgements.owing.get(parcel.key, frozenset())
        if again.attempt >= ATTEMPTS and parcel.owner is source and parcel.target in owing:
            self._replace(again)
            return
        self._ship(again)

    def _replace(self, parcel: Parcel) -> None:
        """Gives the copies of a holder that does not acknowledge to another process."""
        world, owner = self._world, parcel.owner
        assert owner.rank is not None
        if parcel.target not in owner.holders:
            return
        hosts = [process.host for process in world.live]
        rows = {process.rank: process.holders for process in world.live if process.rank is not None}
        placement = Placement(rows, len(owner.holders), world.scenario.replicas)
        after = world.policies.replace_holder(placement, hosts, owner.rank, parcel.target)
        new = set(after.holders[owner.rank]) - set(owner.holders)
        world.report(f"{owner} replaces holder p{parcel.target} by {sorted(new) or 'nobody'}")
        successor = new.pop() if new else None
        own = [key for key in owner.store.slots if key.owner == owner.rank]
        owner.holders = after.holders[owner.rank]
        owner.acknowledgements = owner.acknowledgements.holder_replaced(
            parcel.target, successor, own
        )
        if successor is not None:
            for key in own:
                self.send(owner, owner, key, successor)
        world.poke(owner)
