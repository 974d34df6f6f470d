# SPDX-License-Identifier: Apache-2.0
"""The ring of one rank's slots as a file in shared memory, readable after its writer was killed.

A header page, then descriptors, then the payloads, each on pages of its own. The descriptor of S_k
is the one with the number k modulo capacity; its payload lies behind that of S_(k-1), or where all
slots have equal room, in that of the same number. Who writes a slot reserves its room, which
invalidates the descriptors of all that lay there, writes the payload and publishes the record;
whoever is killed in between leaves a slot that is not held, because a descriptor counts with its
checksum only and a part of the payload with its own.
"""

from __future__ import annotations

import dataclasses
import mmap
import struct
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_moevement.policy.copies.slot_ring import Extent, RingFullError, extent_of
from megatron_moevement.policy.document import Document
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.runtime.slots.hashed_bytes import HASHED
from megatron_moevement.runtime.slots.late_pin import LatePin
from megatron_moevement.runtime.slots.mapped_file import (
    PAGE_BYTES,
    Access,
    MappedFile,
    checksum_of,
    page_aligned,
)
from megatron_moevement.runtime.slots.nameless_file import NamelessFile
from megatron_moevement.runtime.slots.slot_record import (
    MalformedRecordError,
    SlotPart,
    SlotRecord,
    decode_record,
    encode_record,
    max_record_bytes,
)
from megatron_moevement.runtime.slots.store_identity import DamagedFileError, StoreIdentity

__all__ = ["RingFile", "RingShape", "SlotPart", "SlotRecord"]

_CHECKSUM_BYTES = 8
_GUARD = struct.Struct("<QI")
"""Opens a descriptor: checksum of all after it, and length of the encoded record; 0: no slot."""


def _descriptor_bytes(max_parts: int) -> int:
    return -(-(_GUARD.size + max_record_bytes(max_parts)) // 8) * 8


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
        return PAGE_BYTES + page_aligned(self.capacity * _descriptor_bytes(self.max_parts))

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

    def has_room_for(self, record: SlotRecord) -> bool:
        """Returns whether a slot's payload and record fit."""
        room = _descriptor_bytes(self.max_parts) - _GUARD.size
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


class RingFile(MappedFile):
    """The slots of one logical rank in one preallocated file.

    One thread at a time writes a slot; others may read any of them meanwhile and find out by the
    checksums what they read.
    """

    MAGIC = b"MOEVRING"

    def __init__(self, path: Path, header: Mapping[str, Any], mapping: mmap.mmap) -> None:
        """Use `create` or `open`."""
        super().__init__(path, header, mapping)
        try:
            self.owner = LogicalRank.parse(header["owner"])
            self.shape = RingShape.out_of(header)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedFileError(f"{path} is no ring of this version: {error!r}") from error
        self.capacity = self.shape.capacity
        self._descriptor_bytes = _descriptor_bytes(self.shape.max_parts)
        self._payloads_offset = self.shape.payloads_offset
        self._extents: dict[int, Extent] = {}
        self._unpin: weakref.finalize[[], RingFile] | None = None
        self.is_doubted = False
        """Whether a slot was found damaged since all were read last: then none counts unread."""
        self._damaged: dict[int, tuple[SlotRecord, tuple[str, ...]]] = {}

    @classmethod
    def create(
        cls,
        path: Path,
        identity: StoreIdentity,
        owner: LogicalRank,
        shape: RingShape,
        reserve: NamelessFile | None = None,
    ) -> RingFile:
        """Creates an empty ring in place of the file of that name; all its bytes are reserved.

        Args:
            reserve: memory for it, pinned or being pinned where a device is to write there.

        Raises:
            UserError: the file system is too full, or refuses the file.
            ValueError: a size is less than one.
        """
        sizes = shape.document()
        if min(sizes.values()) < 0 or min(shape.capacity, shape.buffer_bytes, shape.max_parts) < 1:
            raise ValueError(f"no ring: {shape}")
        header = {"owner": str(owner), **sizes}
        total_bytes = shape.total_bytes
        ring = cls._create(path, identity, header, total_bytes=total_bytes, reserve=reserve)
        unpin = None if reserve is None else reserve.unpin
        if unpin is not None:
            ring.pin(lambda _: unpin)
        return ring

    @property
    def is_pinned(self) -> bool:
        """Whether the buffers are a target of asynchronous copies."""
        return self._unpin is not None and self._unpin.alive

    def pin(self, pin: Callable[[memoryview], Callable[[], None]]) -> None:
        """Makes the buffers a target of asynchronous copies, once, until the file is closed.

        Args:
            pin: makes memory such a target; returns what undoes it.
        """
        if not self.is_pinned:
            self._unpin = weakref.finalize(self, pin(self.view))
            self._unpin.atexit = False

    def pin_soon(self, pin: Callable[[memoryview], Callable[[], None]]) -> None:
        """Does the same on a thread of its own; what is copied meanwhile takes longer."""
        if not self.is_pinned:
            self._unpin = weakref.finalize(self, LatePin(pin, self.view).undo)
            self._unpin.atexit = False

    def close(self) -> None:
        """Lets go of the file; its memory is pinned no more before its mapping ends."""
        if self._unpin is not None:
            self._unpin()
        super().close()

    def reserve(
        self, step: int, size_bytes: int | None = None, needed: Container[int] = ()
    ) -> memoryview:
        """Returns room for the slot of S_step behind the one before it, to be filled and published.

        What lies there is forgotten before it is overwritten.

        Args:
            size_bytes: as `RingShape.extent_bytes` gives it; None: of the largest slot.
            needed: steps whose slots are.

        Raises:
            RingFullError: a slot that is needed lies there.
        """
        shape = self.shape
        if size_bytes is None:
            size_bytes = shape.extent_bytes(shape.buffer_bytes)
        extent = shape.extent_of(step, size_bytes, self._extents)
        for other in self._at(extent, step):
            if other in needed:
                raise RingFullError(f"step {step} would take the room of step {other}")
        return self._reserve_at(step, extent)

    def take(self, record: SlotRecord, needed: Container[int] = ()) -> memoryview | None:
        """Does the same for a slot of another process: it lies here as it lies there.

        Returns:
            None where it can't lie there, or one that is needed, or an older one of its window.
        """
        if not self.shape.may_lie_at(record.extent, record.payload_bytes):
            return None
        for step in self._at(record.extent, record.step):
            other = self.record(step)
            is_before = other is not None and record.follows(other) and not self.was_damaged(other)
            if is_before or step in needed:
                return None
        return self._reserve_at(record.step, record.extent)

    def _reserve_at(self, step: int, extent: Extent) -> memoryview:
        self._forget(self._at(extent, step))
        self.invalidate(step)
        self._extents[step] = extent
        return self.buffer(step)

    def buffer(self, step: int) -> memoryview:
        """Returns the room of the slot of S_step: it is held, or being written.

        Raises:
            LookupError: it is neither.
        """
        if (extent := self._extents.get(step)) is None:
            raise LookupError(f"{self.path} has no room for the slot of step {step}")
        start = self._payloads_offset + extent.offset
        size_bytes = min(extent.size_bytes, self.shape.buffer_bytes)
        return self.view[start : start + size_bytes]

    def payload_offset(self, record: SlotRecord) -> int:
        """Returns where in the file the payload of a slot begins."""
        return self._payloads_offset + record.extent.offset

    def invalidate(self, step: int) -> None:
        """Forgets the slot of S_step, or whichever has its descriptor."""
        descriptor = self._descriptor(self._place(step))
        descriptor[: _GUARD.size] = bytes(_GUARD.size)
        self._damaged.pop(self._place(step), None)

    def keep_only(self, steps: Container[int]) -> None:
        """Forgets the slots of all other steps, and where they lie."""
        self._forget([step for step in self._extents if step not in steps])

    def _forget(self, steps: Sequence[int]) -> None:
        for step in steps:
            self.invalidate(step)
            del self._extents[step]

    def publish(self, record: SlotRecord) -> SlotRecord:
        """Declares a slot held whose payload is complete in its room.

        Returns:
            The record with the place of the slot.

        Raises:
            LookupError: it has no room.
            ValueError: the record does not fit into the ring.
        """
        room_bytes = self.buffer(record.step).nbytes
        record = dataclasses.replace(record, extent=self._extents[record.step])
        body = encode_record(record)
        descriptor = self._descriptor(self._place(record.step))
        if record.payload_bytes > room_bytes:
            raise ValueError(f"{record.payload_bytes} bytes in a room of {room_bytes}")
        if _GUARD.size + len(body) > len(descriptor):
            raise ValueError(
                f"{self.path} has room for slots of {self.shape.max_parts} parts, not of "
                f"{len(record.parts)}"
            )
        self.invalidate(record.step)
        guarded = struct.pack("<I", len(body)) + body
        descriptor[_CHECKSUM_BYTES : _CHECKSUM_BYTES + len(guarded)] = guarded
        descriptor[:_CHECKSUM_BYTES] = struct.pack("<Q", checksum_of(guarded))
        return record

    def records(self) -> tuple[SlotRecord, ...]:
        """Returns the slots with an intact descriptor, by step; payloads are not looked at."""
        found = [self._read(place) for place in range(self.capacity)]
        intact = [record for record in found if record is not None]
        return tuple(sorted(intact, key=lambda record: record.step))

    def record(self, step: int) -> SlotRecord | None:
        """Returns the record of the slot of S_step, None when it is not held."""
        record = self._read(self._place(step))
        return record if record is not None and record.step == step else None

    def held(self, step: int) -> SlotRecord:
        """Returns the record of the slot of S_step, which is held.

        Raises:
            LookupError: it is not.
        """
        record = self.record(step)
        if record is None:
            raise LookupError(f"no slot of step {step} is held in {self.path}")
        return record

    def payload(self, record: SlotRecord) -> memoryview:
        """Returns the bytes of a slot, in place."""
        start = self.payload_offset(record)
        return self.view[start : start + record.payload_bytes]

    def damaged_parts(self, record: SlotRecord) -> tuple[str, ...]:
        """Returns the parts of a slot whose bytes are not those that were captured.

        Where another slot takes its place meanwhile, nothing is wrong with the memory.
        """
        HASHED.add(sum(part.size_bytes for part in record.parts))
        damaged = record.damaged_parts(self.payload(record))
        found = (record, damaged)
        if damaged and self.record(record.step) == record and not self._is_known(found):
            self._damaged[self._place(record.step)] = found
            self.is_doubted = True
        return damaged

    def was_damaged(self, record: SlotRecord) -> bool:
        """Returns whether a slot was found damaged and has not been written again since."""
        found = self._damaged.get(self._place(record.step))
        return found is not None and found[0] == record

    def _is_known(self, found: tuple[SlotRecord, tuple[str, ...]]) -> bool:
        return self._damaged.get(self._place(found[0].step)) == found

    def _take_over(self, access: Access) -> None:
        del access  # a slot that was cut is not held: there is nothing to put in order
        if self.shape.total_bytes > self.total_bytes:  # a reserve may be larger
            raise DamagedFileError(f"{self.path} was made on a machine with pages of another size")
        self._extents = {record.step: record.extent for record in self.records()}

    def _at(self, extent: Extent, step: int) -> list[int]:
        """Returns the steps of the other slots that lie there, and of who has the descriptor."""
        place, others = self._place(step), self._extents.items()
        return [
            other
            for other, there in others
            if other != step and (there.overlaps(extent) or self._place(other) == place)
        ]

    def _place(self, step: int) -> int:
        if step < 0:
            raise ValueError(f"no state S_{step}")
        return step % self.capacity

    def _descriptor(self, place: int) -> memoryview:
        start = PAGE_BYTES + place * self._descriptor_bytes
        return self.view[start : start + self._descriptor_bytes]

    def _read(self, place: int) -> SlotRecord | None:
        """Returns what a descriptor says, None for one that is empty, torn or damaged."""
        descriptor = bytes(self._descriptor(place))
        checksum, length = _GUARD.unpack_from(descriptor)
        if length == 0 or _GUARD.size + length > len(descriptor):
            return None
        if checksum != checksum_of(descriptor[_CHECKSUM_BYTES : _GUARD.size + length]):
            return None
        try:
            record = decode_record(descriptor[_GUARD.size : _GUARD.size + length])
        except MalformedRecordError:
            return None
        fits = self.shape.may_lie_at(record.extent, record.payload_bytes)
        return record if fits and record.step % self.capacity == place else None
