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
from collections.abc import Callable, Collection, Container, Mapping
from pathlib import Path
from typing import Any

from megatron_moevement.policy.copies.slot_ring import Extent, RingFullError, moved_together
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.slots.hashed_bytes import HASHED
from megatron_moevement.runtime.slots.mapped_file import (
    PAGE_BYTES,
    Access,
    MappedFile,
    checksum_of,
)
from megatron_moevement.runtime.slots.nameless_file import LatePin, NamelessFile
from megatron_moevement.runtime.slots.ring_shape import GUARD, RingShape, descriptor_bytes
from megatron_moevement.runtime.slots.slot_record import (
    MalformedRecordError,
    SlotPart,
    SlotRecord,
    decode_record,
    encode_record,
)
from megatron_moevement.runtime.slots.store_identity import DamagedFileError, StoreIdentity

__all__ = ["RingFile", "RingShape", "SlotPart", "SlotRecord"]

_CHECKSUM_BYTES = 8

_MOVED_BYTES = 16 << 20
"""Moved within a ring at a time: other threads wait as long."""


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
        self._descriptor_bytes = descriptor_bytes(self.shape.max_parts)
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
        return self._reserve_at(step, shape.extent_of(step, size_bytes, self._extents), needed)

    def get(self, record: SlotRecord, needed: Container[int], *, lay: bool = True) -> memoryview:
        """Does the same for a slot that this ring lacks, and that another one has.

        Args:
            needed: steps whose slots are; its place follows from theirs.
            lay: whether that is a ring of the same rank: the slot lies here as there if it fits.

        Raises:
            RingFullError: a slot that is needed lies there.
        """
        stay = {other: there for other, there in self._extents.items() if other in needed}
        stay.pop(record.step, None)
        return self._reserve_at(record.step, self.shape.place_of(record, stay, lay=lay), needed)

    def take(
        self, record: SlotRecord, beside: Container[tuple[Window, int]] = ()
    ) -> memoryview | None:
        """Does the same for a copy of a slot of another process: it lies here as it lies there.

        What comes of one slot in several parts is given the same room.

        Args:
            beside: windows and slots of the copies that stay: where one of them lies there, the
                copy lies elsewhere.

        Returns:
            None where there is no room for it.
        """
        shape, step, extent = self.shape, record.step, record.extent
        if not shape.may_lie_at(extent, record.payload_bytes):
            return None
        reserved = self._extents.get(step)
        if reserved and reserved.size_bytes == extent.size_bytes and self.record(step) is None:
            return self.buffer(step)
        if not self._staying(self._at(extent, step), record, beside):
            return self._reserve_at(step, extent)
        stay = self._staying(self._extents, record, beside)
        try:
            moved, extent = moved_together(extent, stay, shape.room_bytes)
            self._move(moved)
            return self._reserve_at(step, extent, moved)
        except RingFullError:
            return None

    def _staying(
        self, steps: Collection[int], record: SlotRecord, beside: Container[tuple[Window, int]]
    ) -> dict[int, Extent]:
        """Returns where those of some slots lie that stay beside another one.

        Whose descriptor that one gets, its owner's ring has no more. One that was found damaged is
        of no use: elsewhere it would pass for one that was not.
        """
        place = self._place(record.step)
        others = (self.record(step) for step in steps if self._place(step) != place)
        return {
            other.step: other.extent
            for other in others
            if other is not None and other.rollbacks == record.rollbacks
            if (other.window, other.slot) in beside and not self.was_damaged(other)
        }

    def _move(self, moved: Mapping[int, Extent]) -> None:
        """Moves slots towards the start of the ring, the first one first, and forgets all others.

        Whoever is killed meanwhile leaves slots that are not held: those that are not here yet.
        """
        for other in [other for other in self._extents if other not in moved]:
            self.invalidate(other)
            del self._extents[other]
        for step, extent in sorted(moved.items(), key=lambda each: each[1]):
            record = self.held(step)
            if record.extent == extent:
                continue
            self.invalidate(step)
            start = self.payload_offset(record)
            self._extents[step] = extent
            by = record.extent.offset - extent.offset
            for at in range(start, start + record.payload_bytes, _MOVED_BYTES):
                stop = min(at + _MOVED_BYTES, start + record.payload_bytes)
                self.view[at - by : stop - by] = self.view[at:stop]
            self.publish(record)

    def _reserve_at(self, step: int, extent: Extent, needed: Container[int] = ()) -> memoryview:
        others = self._at(extent, step)
        for other in others:
            if other in needed:
                raise RingFullError(f"step {step} would take the room of step {other}")
        for other in others:
            self.invalidate(other)
            del self._extents[other]
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
        descriptor[: GUARD.size] = bytes(GUARD.size)
        self._damaged.pop(self._place(step), None)

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
        if GUARD.size + len(body) > len(descriptor):
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
        checksum, length = GUARD.unpack_from(descriptor)
        if length == 0 or GUARD.size + length > len(descriptor):
            return None
        if checksum != checksum_of(descriptor[_CHECKSUM_BYTES : GUARD.size + length]):
            return None
        try:
            record = decode_record(descriptor[GUARD.size : GUARD.size + length])
        except MalformedRecordError:
            return None
        fits = self.shape.may_lie_at(record.extent, record.payload_bytes)
        return record if fits and record.step % self.capacity == place else None
