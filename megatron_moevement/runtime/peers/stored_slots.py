# SPDX-License-Identifier: Apache-2.0
"""What a process keeps in its store, as its server sees it: its own ring and those of others."""

from __future__ import annotations

import threading
from collections.abc import Callable

from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.runtime.peers.ledger_messages import History
from megatron_moevement.runtime.slots.ring_file import RingFile
from megatron_moevement.runtime.slots.slot_record import SlotRecord


class StoredSlots:
    """Rings for the server to write copies into and to read slots from.

    Several threads of the server call it at a time. The server is closed before the rings are.
    """

    def __init__(
        self,
        own: RingFile | None,
        take_over: Callable[[LogicalRank], RingFile | None] = lambda owner: None,
        stored: Callable[[SlotKey, SlotRecord], None] = lambda slot, record: None,
        learn: Callable[[History], None] = lambda history: None,
    ) -> None:
        """Begins without any ring for copies.

        Args:
            own: ring of the rank that this process occupies; None for a spare.
            take_over: returns a ring for copies that nobody meant for this process so far, None
                where it keeps none; threads of the server call it, one at a time.
            stored: is told of every copy that is complete, checked and published in its ring, by a
                thread of the server.
            learn: is told what goes with the slots of a rank, by a thread of the server; raises
                UserError where that can't be kept here.
        """
        self._own = own
        self._take_over = take_over
        self.stored = stored
        self.learn = learn
        self._lock = threading.Lock()
        self._taking_over = threading.Lock()
        self._held: dict[LogicalRank, RingFile] = {}
        self._left: tuple[RingFile, ...] = ()

    def keep(self, ring: RingFile) -> None:
        """Takes copies of the slots of the ring's owner from now on."""
        with self._lock:
            self._held[ring.owner] = ring

    def serve(self, ring: RingFile) -> None:
        """Gives the slots of a ring that nobody writes to any more, whoever its owner is."""
        with self._lock:
            self._left += (ring,)

    def drop(self, ring: RingFile) -> None:
        """Takes and gives no slots of a ring any more."""
        with self._lock:
            self._left = tuple(each for each in self._left if each is not ring)
            if self._held.get(ring.owner) is ring:
                self._held.pop(ring.owner)

    def ring_for(self, owner: LogicalRank) -> RingFile | None:
        """Returns the ring for copies of an owner's slots, None where none are to be kept here.

        Raises:
            UserError: there is no room for a new one.
        """
        with self._taking_over:
            ring = self._held.get(owner)
            if ring is None and (ring := self._take_over(owner)) is not None:
                self.keep(ring)
            return ring

    @property
    def rings(self) -> tuple[RingFile, ...]:
        """The own ring, those with copies, and those that were left."""
        with self._lock:
            own = () if self._own is None else (self._own,)
            return (*own, *self._held.values(), *self._left)

    def find(self, slot: SlotKey) -> tuple[RingFile, SlotRecord] | None:
        """Returns a slot of the own ring, of one with copies, or of one that was left."""
        with self._lock:
            rings = (self._own, self._held.get(slot.owner), *self._left)
        for each in rings:
            if each is None or each.owner != slot.owner:
                continue
            record = each.record(slot.step)
            if record is not None and (record.window, record.slot) == (slot.window, slot.slot):
                return each, record
        return None
