# SPDX-License-Identifier: Apache-2.0
"""The shape of a ring of slots: its sizes, and where in its file a slot may lie."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping, Sequence

from megatron_moevement.policy.copies.slot_ring import Extent, extent_of, place_of
from megatron_moevement.policy.document import Document
from megatron_moevement.runtime.slots.mapped_file import PAGE_BYTES, page_aligned
from megatron_moevement.runtime.slots.slot_record import (
    SlotRecord,
    encode_record,
    max_record_bytes,
)

GUARD = struct.Struct("<QI")
"""Opens a descriptor: checksum of all after it, and length of the encoded record; 0: no slot."""


def descriptor_bytes(max_parts: int) -> int:
    """Returns the room of the descriptor of a slot of so many parts."""
    return -(-(GUARD.size + max_record_bytes(max_parts)) // 8) * 8


@dataclasses.dataclass(frozen=True)
class RingShape(Document):
    """Sizes of a ring.

    Attributes:
        capacity: the most slots.
        buffer_bytes: of the largest slot.
        max_parts: of a slot.
        room_bytes: of all slots together.
        granule_bytes: each slot takes a multiple of so many.
        extras_bytes: room behind the operators of each slot.
    """

    capacity: int
    buffer_bytes: int
    max_parts: int
    room_bytes: int
    granule_bytes: int
    extras_bytes: int = 0

    @classmethod
    def equal(
        cls, capacity: int, buffer_bytes: int, max_parts: int, extras_bytes: int = 0
    ) -> RingShape:
        """Returns a ring of equal buffers: the slot of S_k is in buffer k modulo capacity."""
        stride = page_aligned(buffer_bytes)
        return cls(capacity, buffer_bytes, max_parts, capacity * stride, stride, extras_bytes)

    @property
    def payloads_offset(self) -> int:
        """Where in the file the payloads begin."""
        return PAGE_BYTES + page_aligned(self.capacity * descriptor_bytes(self.max_parts))

    @property
    def total_bytes(self) -> int:
        """Bytes of the file: what has to be announced before it is created."""
        return self.payloads_offset + self.room_bytes

    def extent_bytes(self, operators_bytes: int) -> int:
        """Returns what a slot takes, whose operators take so much."""
        size_bytes = min(operators_bytes + self.extras_bytes, self.buffer_bytes)
        return max(-(-size_bytes // self.granule_bytes), 1) * self.granule_bytes

    def extent_of(self, step: int, size_bytes: int, extents: Mapping[int, Extent]) -> Extent:
        """Returns where the slot of S_step lies: behind the one before it, or in its own buffer.

        Args:
            size_bytes: as `extent_bytes` gives it.
            extents: of the slots that lie there, by their steps.
        """
        if self.room_bytes == self.capacity * self.granule_bytes:
            return Extent(step % self.capacity * self.granule_bytes, self.granule_bytes)
        return extent_of(step, size_bytes, extents, self.room_bytes)

    def place_of(self, record: SlotRecord, extents: Mapping[int, Extent], *, lay: bool) -> Extent:
        """Returns where a slot lies that comes out of another ring, of this rank if it `lay`."""
        there, size_bytes = record.extent, record.extent.size_bytes
        if self.room_bytes == self.capacity * self.granule_bytes:
            return self.extent_of(record.step, size_bytes, extents)
        known = there if lay and self.may_lie_at(there, record.payload_bytes) else None
        return place_of(record.step, size_bytes, known, extents, self.room_bytes)

    def has_room_for(self, record: SlotRecord) -> bool:
        """Returns whether a slot's payload and record fit."""
        room = descriptor_bytes(self.max_parts) - GUARD.size
        return record.payload_bytes <= self.buffer_bytes and len(encode_record(record)) <= room

    def has_room_for_all(self, records: Sequence[SlotRecord]) -> bool:
        """Returns whether an empty ring has room for slots that follow each other."""
        taken_bytes = 0
        for record in records:
            size_bytes = self.extent_bytes(record.operators_bytes)
            if record.payload_bytes > size_bytes or not self.has_room_for(record):
                return False
            taken_bytes += size_bytes
        return len(records) <= self.capacity and taken_bytes <= self.room_bytes

    def may_lie_at(self, extent: Extent, payload_bytes: int) -> bool:
        """Returns whether a slot may lie there."""
        is_within = payload_bytes <= extent.size_bytes and extent.stop <= self.room_bytes
        return is_within and not (extent.offset % PAGE_BYTES or extent.size_bytes % PAGE_BYTES)
