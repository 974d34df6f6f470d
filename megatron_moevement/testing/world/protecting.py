"""Protecting: who keeps copies from now on, and the copies that training waits for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron_moevement.policy.copies.persistence import Acknowledgements, SlotKey
from megatron_moevement.policy.copies.placement import Placement, repair_placement
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.testing.world.process import At, Commands, Join, Process, Until

if TYPE_CHECKING:
    from megatron_moevement.testing.world.world import World


@dataclasses.dataclass(frozen=True)
class Inventory:
    """What a process says before copies are planned.

    Attributes:
        rank: the logical rank that it occupies.
        holders: who keeps copies of its slots so far.
        slots: the intact slots that it has.
        needed: those of its own that are still needed, whoever has them.
        in_flight: those of them that a window to come needs.
    """

    rank: LogicalRank | None
    holders: tuple[int, ...]
    slots: frozenset[SlotKey]
    needed: frozenset[int]
    in_flight: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Protection:
    """What everybody agrees on: who holds copies, what is where, and what is lost."""

    placement: Placement
    lost: tuple[tuple[LogicalRank, int], ...]
    held: Mapping[SlotKey, frozenset[int]]


def protect(
    world: World, process: Process, members: tuple[int, ...], schedule_version: int
) -> Commands:
    """Sends own slots of an epoch to holders that lack them; waits for a copy of each at first.

    Training goes on once the slots of the oldest window have a copy elsewhere.
    """
    if process.capturing is not None:
        yield Until(lambda: process.capturing is None, "the capture")
    intact = frozenset(
        key
        for key, stored in process.store.slots.items()
        if stored.intact and key.window.schedule_version == schedule_version
    )
    persisted = process.store.persisted
    first = process.ring.oldest if persisted is None else persisted.last + 1
    needed = frozenset(process.ring.steps)
    in_flight = frozenset(step for step in needed if step >= first)
    own = Inventory(process.rank, process.holders, intact, needed, in_flight)

    def combine(published: dict[int, Inventory]) -> Protection:
        return _plan(world, published)

    protection: Protection = yield Join(("protect",), members, process.number, own, combine)
    if protection.lost:
        world.report(f"{process} hears that a slot of step {protection.lost[0][1]} is nowhere")
        world.restarts.restart_soon()
        yield Until(lambda: False, "the restart")
    if process.rank is not None:
        process.holders = protection.placement.holders[process.rank]
        world.invariants.placed(process, members)
        process.acknowledgements = _acknowledgements(world, process, own, protection)
    own_slots = sorted(key for key in protection.held if key.owner == process.rank)
    for key in own_slots:
        for holder in _lacking(process, protection, key):
            world.replicator.send(process, process, key, holder)
    urgent = [key for key in own_slots if key.window == own_slots[0].window]
    yield Until(lambda: all(_is_safe(world, process, key) for key in urgent), "urgent copies")
    yield At(FaultPoint.REJOIN)
    yield Join(("protected",), members, process.number, None, len)


def _lacking(process: Process, protection: Protection, key: SlotKey) -> list[int]:
    """Returns the holders of a process that are to get an own slot of it; it must have it."""
    having = protection.held[key]
    if process.number not in having:
        return []
    return [holder for holder in process.holders if holder not in having]


def _is_safe(world: World, owner: Process, key: SlotKey) -> bool:
    """Returns whether a slot has a copy in another failure domain, or nobody could keep one."""
    elsewhere = [other for other in world.live if other.domain != owner.domain]
    return not owner.holders or any(key in other.store.slots for other in elsewhere)


def _plan(world: World, published: dict[int, Inventory]) -> Protection:
    hosts = [world.processes[number].host for number in sorted(published)]
    rows = {
        inventory.rank: inventory.holders
        for inventory in published.values()
        if inventory.rank is not None
    }
    replicas = world.scenario.replicas
    if any(rows.values()):
        former = Placement(rows, replicas, replicas)
        placement = repair_placement(former, hosts)
    else:
        placement = world.policies.place_replicas(hosts, replicas)
    needed = {inventory.rank: inventory.needed for inventory in published.values()}
    held: dict[SlotKey, set[int]] = {}
    for number, inventory in sorted(published.items()):
        for key in inventory.slots:
            if key.step in needed.get(key.owner, ()):
                held.setdefault(key, set()).add(number)
    everywhere = {key: frozenset(numbers) for key, numbers in held.items()}
    occupant = {inventory.rank: number for number, inventory in published.items()}
    there = {(key.owner, key.step) for key in held if occupant[key.owner] in held[key]}
    lost = (
        (inventory.rank, step)
        for inventory in published.values()
        for step in sorted(inventory.in_flight)
        if inventory.rank is not None and (inventory.rank, step) not in there
    )
    return Protection(placement, tuple(lost), everywhere)


def _acknowledgements(
    world: World, process: Process, own: Inventory, protection: Protection
) -> Acknowledgements:
    """Returns what a rank knows of the copies of its slots in flight.

    The persisted window is not among them: what faults take from it must not hold up the next one.
    What counts is what was published: the copies are sent by it.
    """
    persisted = process.store.persisted

    def in_flight(key: SlotKey) -> bool:
        return key.step in process.ring.steps and (persisted is None or key.window > persisted)

    acknowledgements = world.policies.acknowledgements()
    for key in own.slots:
        if key.owner == process.rank and in_flight(key):
            held = protection.held[key] & frozenset(process.holders)
            lacking = _lacking(process, protection, key)
            acknowledgements = acknowledgements.landed(key, lacking, held)
    return acknowledgements
