"""Protecting: who keeps copies from now on, and the copies that training waits for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron_moevement.policy.persistence import Acknowledgements, SlotKey
from megatron_moevement.policy.placement import Placement
from megatron_moevement.policy.ranks import LogicalRank
from megatron_moevement.policy.replication import ReplicationPlan, Urgency
from megatron_moevement.settings.faults import Place
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
    """What everybody agrees on: who holds copies, what is to be copied, what is where and lost."""

    placement: Placement
    copies: ReplicationPlan
    lost: tuple[tuple[LogicalRank, int], ...]
    held: Mapping[SlotKey, frozenset[int]]


def protect(world: World, process: Process, members: tuple[int, ...], epoch: int) -> Commands:
    """Plans the copies of windows of an epoch that are missing; waits for those that are urgent."""
    if process.capturing is not None:
        yield Until(lambda: process.capturing is None, "the capture")
    intact = frozenset(
        key
        for key, stored in process.store.slots.items()
        if stored.intact and key.window.epoch == epoch
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
    urgent = []
    for copy in protection.copies.copies:
        if copy.source != process.number:
            continue
        owner = world.occupant(copy.slot.owner)
        if owner is not None:
            world.replicator.send(process, owner, copy.slot, copy.target)
        if copy.urgency is Urgency.BEFORE_TRAINING:
            urgent.append(copy.slot)
    yield Until(lambda: all(_is_safe(world, process, key) for key in urgent), "urgent copies")
    yield At(Place.REJOIN)
    yield Join(("protected",), members, process.number, None, len)


def _is_safe(world: World, source: Process, key: SlotKey) -> bool:
    """Returns whether a slot has a copy in another failure domain, or nobody could keep one."""
    elsewhere = [other for other in world.live if other.domain != source.domain]
    if any(key in other.store.slots for other in elsewhere):
        return True
    owner = world.occupant(key.owner)
    return owner is not None and not owner.holders


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
        placement = world.policies.repair_placement(former, hosts)
    else:
        placement = world.policies.place_replicas(hosts, replicas)
    needed = {inventory.rank: inventory.needed for inventory in published.values()}
    held: dict[SlotKey, set[int]] = {}
    for number, inventory in sorted(published.items()):
        for key in inventory.slots:
            if key.step in needed.get(key.owner, ()):
                held.setdefault(key, set()).add(number)
    everywhere = {key: frozenset(numbers) for key, numbers in held.items()}
    copies = world.policies.plan_replication(everywhere, placement, hosts)
    there = {(key.owner, key.step) for key in held}
    lost = (
        (inventory.rank, step)
        for inventory in published.values()
        for step in sorted(inventory.in_flight)
        if inventory.rank is not None and (inventory.rank, step) not in there
    )
    return Protection(placement, copies, tuple(lost), everywhere)


def _acknowledgements(
    world: World, process: Process, own: Inventory, protection: Protection
) -> Acknowledgements:
    """Returns what a rank knows of the copies of its slots in flight.

    The persisted window is not among them: what faults take from it must not hold up the next one.
    What counts is what was published: the copies were planned from it.
    """
    persisted = process.store.persisted

    def in_flight(key: SlotKey) -> bool:
        return key.step in process.ring.steps and (persisted is None or key.window > persisted)

    missing: dict[SlotKey, list[int]] = {
        key: [] for key in own.slots if key.owner == process.rank and in_flight(key)
    }
    for copy in protection.copies.copies:
        if copy.slot.owner == process.rank and in_flight(copy.slot):
            missing.setdefault(copy.slot, []).append(copy.target)
    acknowledgements = world.policies.acknowledgements()
    for key, targets in missing.items():
        held = protection.held.get(key, frozenset()) & frozenset(process.holders)
        acknowledgements = acknowledgements.landed(key, targets, held)
    return acknowledgements
