"""Copying: how a simulated process takes a lost state from the live state of a replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.recovery.plan import Plan, SlotFetch
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.testing.world.process import At, Commands, Join, Pass, Process, Sleep, Until
from megatron_moevement.testing.world.store import StoredSlot

if TYPE_CHECKING:
    from megatron_moevement.testing.world.world import World

FETCH_TIME = 0.6
COPY_TIME = 1.5


def copy_states(world: World, process: Process, plan: Plan, members: tuple[int, ...]) -> Commands:
    """Copies the state of this process's rank, if the plan says so; nobody moves on before."""
    copy = next((each for each in plan.copies if each.rank == process.rank), None)
    if copy is not None:
        process.live, process.run, process.capturing = None, None, None
        yield Sleep(COPY_TIME)
        source = world.processes[copy.source]
        yield At(FaultPoint.SERVE_STATE, copy.source)
        if not source.alive or source.live is None:
            yield Until(lambda: False, "the restart")
        assert source.live is not None
        process.live = source.live.copy()
        world.invariants.logs.copied[process.number] = plan.target
        world.report(f"{process} copies the state of {source}")
        yield Pass()
    yield Join(("copied",), members, process.number, None, len)


def fetch_slots(world: World, process: Process, plan: Plan) -> Commands:
    """Brings the slots that the plan gives a rank into the own store, checked."""
    if process.rank is None:
        return
    for fetch in plan.fetches_of(process.rank):
        own = fetch.slot._replace(owner=fetch.rank)  # a replica's slot becomes its own
        if fetch.source != process.number or own not in process.store.slots:
            yield Sleep(FETCH_TIME)
            yield from _fetch(world, process, fetch)
        yield Pass()


def _fetch(world: World, process: Process, fetch: SlotFetch) -> Commands:
    """Takes a slot from the first of its sources that gives it, whichever replica it was of."""
    stored, key = None, fetch.slot
    for source in fetch.sources:
        holder = world.processes[source]
        yield At(FaultPoint.SERVE_SLOT, source)
        stored = holder.store.slots.get(key) if holder.alive else None
        if stored is not None and stored.intact:
            break
        world.report(f"{process} finds no intact {key} at {holder}")
    if stored is None or not stored.intact:
        world.restarts.restart_soon()
        yield Until(lambda: False, "the restart")
    assert stored is not None
    yield At(FaultPoint.FETCH)
    own = SlotKey(fetch.rank, key.window, key.slot)
    world.commits.make_room(process, own)
    process.store.slots[own] = StoredSlot(stored.content)
    world.invariants.stored(process, own)
