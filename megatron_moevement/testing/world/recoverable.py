"""What a job could recover from some stores, as the truth and not as any decision says."""

from __future__ import annotations

from collections.abc import Collection

from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.testing.world.shape import Shape
from megatron_moevement.testing.world.store import Store


def recoverable_step(stores: Collection[Store], shape: Shape) -> int | None:
    """Returns the newest step of the newest history that can be replayed from some stores.

    Args:
        stores: all that may be used.
        shape: of the job.
    """
    knowing = [store for store in stores if store.committed is not None]
    rollbacks = max((store.rollbacks for store in knowing), default=0)
    knowing = [store for store in knowing if store.rollbacks == rollbacks]
    committed = max((store.committed or 0 for store in knowing), default=0)
    persisted = max((store.persisted for store in knowing if store.persisted), default=None)
    if persisted is None or committed < persisted.last:
        return None
    there = {key for store in knowing for key, slot in store.slots.items() if slot.intact}
    replayed = range(persisted.start + 1, committed + 1)
    has_ledger = any(all(step in store.ledger for step in replayed) for store in knowing)
    return committed if has_ledger and _is_whole(persisted, there, shape) else None


def _is_whole(window: Window, there: Collection[SlotKey], shape: Shape) -> bool:
    return all(
        SlotKey(rank, window, slot) in there
        for rank in shape.layout.ranks
        for slot in range(window.size)
    )
