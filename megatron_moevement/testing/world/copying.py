"""Copying: how a simulated process takes a lost state from the live state of a replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_moevement.policy.persistence import SlotKey
from megatron_moevement.policy.plan import Plan, WindowEdges
from megatron_moevement.policy.ring import SlotRing
from megatron_moevement.settings.faults import Place
from megatron_moevement.testing.world.process import At, Commands, Join, Pass, Process, Sleep, Until
from megatron_moevement.testing.world.store import StoredSlot

if TYPE_CHECKING:
    from megatron_moevement.testing.world.world import World

FETCH_TIME = 0.6
COPY_TIME = 1.5


def copy_states(world: World, process: Process, plan: Plan, members: tuple[int, ...]) -> Commands:
    """Copies the state of this process's rank, if the plan says so; nobody moves on before."""
    yield Join(("settled",), members, process.number, None, len)
    copy = next((each for each in plan.copies if each.rank == process.rank), None)
    if copy is not None:
        process.live, process.run, process.capturing = None, None, None
        if plan.edges is WindowEdges.KEPT:
            yield from complete(world, process, plan, plan.target)
        for key in copy.slots:
            yield from fetch(world, process, key, copy.source)
        yield Sleep(COPY_TIME)
        source = world.processes[copy.source]
        yield At(Place.SERVE_STATE, copy.source)
        if not source.alive or source.live is None:
            yield Until(lambda: False, "the restart")
        assert source.live is not None
        process.live = source.live.copy()
        world.invariants.logs.copied[process.number] = plan.target
        world.report(f"{process} copies the state of {source}")
        yield Pass()
    yield Join(("copied",), members, process.number, None, len)


def complete(world: World, process: Process, plan: Plan, step: int) -> Commands:
    """Brings what any process has of the own slots that are still needed into the own store.

    The ring is what the slots are then, for a rank that goes on from S_step.
    """
    rank, window = process.rank, plan.persisted
    assert rank is not None
    first = process.schedule.first_step if window is None else window.start
    for each in range(first, step):
        key = SlotKey(rank, process.schedule.window_of(each), process.schedule.slot_of(each))
        holders = [
            other.number
            for other in world.live
            if (stored := other.store.slots.get(key)) is not None and stored.intact
        ]
        if holders and process.number not in holders:
            yield from fetch(world, process, key, holders[0])
    own = process.store.own_slot(rank, step)
    has_last = own is not None and process.store.slots[own].intact
    process.ring = SlotRing(process.ring.capacity, first, step + has_last)


def fetch(world: World, process: Process, key: SlotKey, source: int) -> Commands:
    """Brings a slot into the own store as one of the own rank, whichever replica it was of."""
    assert process.rank is not None
    yield Sleep(FETCH_TIME)
    holder = world.processes[source]
    yield At(Place.SERVE_SLOT, source)
    stored = holder.store.slots.get(key) if holder.alive else None
    if stored is None or not stored.intact:
        world.report(f"{process} finds no intact {key} at {holder}")
        world.restarts.restart_soon()
        yield Until(lambda: False, "the restart")
    assert stored is not None
    yield At(Place.FETCH)
    own = SlotKey(process.rank, key.window, key.slot)
    world.commits.make_room(process, own)
    process.store.slots[own] = StoredSlot(stored.content)
    world.invariants.stored(process, own)
