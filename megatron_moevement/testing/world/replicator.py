# SPDX-License-Identifier: Apache-2.0
"""The replicator: copies of slots on their way to holders, over links that lose and damage."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from megatron_moevement.policy.copies.commit import newest_persisted
from megatron_moevement.policy.copies.peer_trouble import Remedy, Trouble, successor_of
from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.copies.placement import Placement
from megatron_moevement.policy.watching.measurements import Work
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.testing.world.meter import UNIT_S
from megatron_moevement.testing.world.process import Process
from megatron_moevement.testing.world.scenario import Links
from megatron_moevement.testing.world.simulated_store import StoredSlot

if TYPE_CHECKING:
    from megatron_moevement.testing.world.world import World

COPY_TIME = 0.5
ACKNOWLEDGE_TIME = 0.1
_SLOWNESS = {Links.DEFAULT: 1.0, Links.LOSSY: 1.5, Links.SLOW: 14.0}
_LOSS = {Links.DEFAULT: 0.0, Links.LOSSY: 0.15, Links.SLOW: 0.02}


@dataclasses.dataclass(frozen=True)
class Parcel:
    """One copy on its way.

    Attributes:
        source: who sends it, of the state of its rank.
        key: what is copied.
        target: number of the process that gets it.
        sent_in: the generation in which it was sent.
        sent_at: when.
        accounted: slots that its owner accounted for then.
    """

    source: Process
    key: SlotKey
    target: int
    sent_in: int
    sent_at: float
    accounted: frozenset[SlotKey] = frozenset()


class Replicator:
    """Moves slots between processes and sees to it that they arrive."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._cut_off: dict[int, float] = {}

    def cut_off(self, source: Process, lasts: float) -> None:
        """Lets every transfer from a process fail for a while."""
        self._cut_off[source.number] = self._world.clock.now + lasts

    def send(self, source: Process, key: SlotKey, target: int) -> None:
        """Sends a copy of a slot; it is sent again until it is acknowledged."""
        now = self._world.clock.now
        self._ship(Parcel(source, key, target, source.generation, now))

    def _ship(self, parcel: Parcel) -> None:
        draw, scenario, work = self._world.random, self._world.scenario, None
        accounted = frozenset(parcel.source.acknowledgements.owing)
        parcel = dataclasses.replace(parcel, accounted=accounted)
        links = scenario.links
        delay = COPY_TIME * _SLOWNESS[links] * (1 + draw.random() * 0.4)
        fails = draw.random() < _LOSS[links]
        stored = parcel.source.store.slots.get(parcel.key)
        if scenario.conditions.measures and stored is not None:
            link_times = self._world.link_times
            begun, work = link_times.transfer(parcel.source, parcel.target, stored.content)
            delay = begun - parcel.sent_at + work.spent_s / UNIT_S
            parcel = dataclasses.replace(parcel, sent_at=begun)
        self._world.clock.after(delay, self._arrive, parcel, fails, work)

    def _arrive(self, parcel: Parcel, fails: bool, work: Work | None) -> None:
        """Ends a transfer: lost, cut, refused by its checksum, late, or stored."""
        world, source = self._world, parcel.source
        target = world.processes[parcel.target]
        if source.alive:
            world.faults.pass_by(source, FaultPoint.SEND)
        stored = source.store.slots.get(parcel.key)
        if not source.alive and world.random.random() < 0.5:
            return
        if not target.alive:
            return
        if not world.policies.is_current(parcel.sent_in, target.generation):
            return
        if stored is not None and not stored.intact:
            self._note_damaged(parcel)
            return
        fails = fails or world.clock.now < self._cut_off.get(source.number, 0.0)
        if fails or target.hung or stored is None:
            if source.alive and source.generation == parcel.sent_in and stored is not None:
                self._failed(parcel)
            return
        source.troubles.pop(parcel.target, None)
        if work is not None:
            source.scheduling.meter.sent[parcel.target].append(work)
        self._take_along(target, parcel)
        # A holder gets a rank's slots one after the other: the next one is sent by what is known
        # of those before it.
        is_current = source.generation == parcel.sent_in
        accounted = source.acknowledgements.owing.keys() if is_current else parcel.accounted
        extent = world.commits.make_room_for_copy(target, source, parcel.key, accounted)
        target.store.slots[parcel.key] = StoredSlot(stored.content, extent)
        world.invariants.stored(target, parcel.key)
        world.poke(source)
        delay = ACKNOWLEDGE_TIME * (1 + world.random.random())
        world.clock.after(delay, self._acknowledge, parcel)

    def _take_along(self, target: Process, parcel: Parcel) -> None:
        """Takes over what travels with a slot: what a lost rank would take with it.

        A spare hears of no barrier: it learns from the copies what is committed, what is persisted
        and what it may forget.
        """
        world, source, store = self._world, parcel.source.store, target.store
        if target.rank is not None:
            return
        store.ledger.update(source.ledger)
        store.losses.update(source.losses)
        if source.committed is not None:
            store.committed = max(store.committed or 0, source.committed)
        store.bound_ledger(world.scenario.ledger_capacity)
        store.timetable, store.schedules = source.timetable, source.schedules
        store.persisted = newest_persisted(store.persisted, source.persisted)

    def _acknowledge(self, parcel: Parcel) -> None:
        owner = parcel.source
        if not owner.alive:
            return
        if not self._world.policies.is_current(parcel.sent_in, owner.generation):
            return
        owner.acknowledgements = owner.acknowledgements.acknowledged(parcel.key, parcel.target)
        self._world.invariants.acknowledged(owner, parcel.key, parcel.target)
        self._world.poke(owner)

    def _note_damaged(self, parcel: Parcel) -> None:
        """Notes a slot that can't be sent; who needs it must not go on."""
        source = parcel.source
        self._world.report(f"{source} finds its slot of step {parcel.key.step} damaged")
        source.damaged.add(parcel.key)
        if source.acknowledgements.lost_of(source.damaged):
            self._world.restarts.restart_soon()

    def _failed(self, parcel: Parcel) -> None:
        """Sees to a transfer that has failed: it is repeated, or somebody else gets the copies."""
        world, source = self._world, parcel.source
        now, former = world.clock.now, source.troubles.get(parcel.target)
        trouble = Trouble.after(former, parcel.sent_at, now, "a transfer failed")
        source.troubles[parcel.target] = trouble
        owing = source.acknowledgements.owing.get(parcel.key, frozenset())
        if trouble.is_lasting and parcel.target in owing and self._replace(parcel):
            return
        world.clock.after(trouble.pause_s, self._retry, parcel, trouble)

    def _retry(self, parcel: Parcel, trouble: Trouble) -> None:
        source = parcel.source
        if not source.alive or source.generation != parcel.sent_in:
            return
        if parcel.key not in source.store.slots:
            return
        now = self._world.clock.now
        if self._world.policies.remedy(trouble, now) is Remedy.WAIT:
            self._world.clock.after(trouble.pause_s, self._retry, parcel, trouble)
            return
        self._ship(dataclasses.replace(parcel, sent_at=now))

    def _replace(self, parcel: Parcel) -> bool:
        """Gives the copies of a silent holder to another process, unless that was done before.

        Where there is none it is tried on, and slots with another copy are complete without; only
        then it returns False.
        """
        world, owner = self._world, parcel.source
        if parcel.target not in owner.holders:
            return True
        hosts = [process.host for process in world.live]
        rows = {process.rank: process.holders for process in world.live if process.rank is not None}
        placement = Placement(rows, len(owner.holders), world.scenario.replicas)
        rank, troubles, now = owner.place, owner.troubles, world.clock.now
        successor, after = successor_of(
            placement, hosts, rank, parcel.target, troubles=troubles, now_s=now
        )
        name = "nobody" if successor is None else [successor]
        world.report(f"{owner} replaces holder p{parcel.target} by {name}")
        if successor is None:
            owner.acknowledgements = owner.acknowledgements.holder_excused(parcel.target)
            world.poke(owner)
            return False
        own = [key for key in owner.store.slots if key.owner == rank]
        owner.holders = after.holders[rank]
        owner.acknowledgements = owner.acknowledgements.holder_replaced(
            parcel.target, successor, own
        )
        for key in own:
            self.send(owner, key, successor)
        world.poke(owner)
        return True
