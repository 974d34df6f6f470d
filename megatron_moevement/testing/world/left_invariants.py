"""Invariants of stores without a process: used while they lead further, kept while needed."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.recovery.plan import Plan
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.testing.world.process import Process
from megatron_moevement.testing.world.shape import Shape
from megatron_moevement.testing.world.store import Store
from megatron_moevement.testing.world.violations import require

if TYPE_CHECKING:
    from megatron_moevement.testing.world.world import World


class LeftInvariants:
    """Watches what dead processes left."""

    def __init__(self, world: World) -> None:
        """Watches a world from its start."""
        self._world = world

    def goes_back(self, plan: Plan) -> None:
        """7: a job goes back to what is durable only where no memory could bring it further."""
        live = self._world.live
        stores = [*(process.store for process in live), *self._world.machines.within_reach()]
        step = _recoverable_step(stores, self._world.shape)
        there = [process.store.committed for process in live if not process.is_new]
        if any(committed is not None for committed in there):
            step = min(step or 0, max(committed or 0 for committed in there))
        further = step is not None and step > plan.target
        what = f"the job goes back to step {plan.target}, step {step} is in memory"
        require(not further, "7 recoverable", what)

    def forgets(self, process: Process, removed: Collection[Store]) -> None:
        """2: nothing is removed that could be needed, as far as damage can be seen.

        Without a recovery nobody reads a slot, so one that is damaged counts as any other.
        """
        world = self._world
        kept = [each.store for each in world.live]
        before = _recoverable_step([*kept, *world.machines.stores], world.shape, unread=True)
        others = [each for each in world.machines.stores if not any(each is one for one in removed)]
        after = _recoverable_step([*kept, *others], world.shape, unread=True)
        needed = before is not None and (after is None or after < before)
        require(not needed, "2 removed", process, "removes stores that lead to step", before)


def _recoverable_step(
    stores: Collection[Store], shape: Shape, *, unread: bool = False
) -> int | None:
    """Returns the newest step of the newest history that can be replayed from some stores.

    It is the truth, and not what any decision says.

    Args:
        unread: whether damage to a slot is still unseen.
    """
    knowing = [store for store in stores if store.committed is not None]
    rollbacks = max((store.rollbacks for store in knowing), default=0)
    knowing = [store for store in knowing if store.rollbacks == rollbacks]
    committed = max((store.committed or 0 for store in knowing), default=0)
    persisted = max((store.persisted for store in knowing if store.persisted), default=None)
    if persisted is None or committed < persisted.last:
        return None
    there = {key for store in knowing for key, slot in store.slots.items() if slot.intact or unread}
    replayed = range(persisted.start + 1, committed + 1)
    has_ledger = any(all(step in store.ledger for step in replayed) for store in knowing)
    return committed if has_ledger and _is_whole(persisted, there, shape) else None


def _is_whole(window: Window, there: Collection[SlotKey], shape: Shape) -> bool:
    return all(
        SlotKey(rank, window, slot) in there
        for rank in shape.layout.ranks
        for slot in range(window.size)
    )
