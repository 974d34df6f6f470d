# SPDX-License-Identifier: Apache-2.0
"""The ring of one rank's slots as a file in shared memory, readable after its writer was killed.

A header page, then for each buffer a descriptor, then the buffers, each on pages of its own. The
slot of S_k is in buffer k modulo capacity. Who writes one invalidates the descriptor, writes the
payload and publishes the record; whoever is killed in between leaves a slot that is not held,
because a descriptor counts with its checksum only and a part of the payload with its own.
"""

from __future__ import annotations

import dataclasses
import mmap
import struct
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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

_GUARD = struct.Struct("<QI")
"""Opens a descriptor: checksum of all after it, and length of the encoded record; 0: no slot."""
_CHECKSUM_BYTES = 8


def _descriptor_bytes(max_parts: int) -> int:
    return -(-(_GUARD.size + max_record_bytes(max_parts)) // 8) * 8


@dataclasses.dataclass(frozen=True)
class RingShape(Document):
    """Sizes of a ring: number of buffers, bytes of each, and the most parts of a slot."""

    capacity: int
    buffer_bytes: int
    max_parts: int

    @property
    def buffers_offset(self) -> int:
        """Where in the file the buffers begin."""
        return PAGE_BYTES + page_aligned(self.capacity * _descriptor_bytes(self.max_parts))

    @property
    def total_bytes(self) -> int:
        """Bytes of the file: what has to be announced before it is created."""
        return self.buffers_offset + self.capacity * page_aligned(self.buffer_bytes)

    def has_room_for(self, record: SlotRecord) -> bool:
        """Returns whether a slot's payload and record fit."""
        room = _descriptor_bytes(self.max_parts) - _GUARD.size
        return record.payload_bytes <= self.buffer_bytes and len(encode_record(record)) <= room


class RingFile(MappedFile):
    """The slots of one logical rank in preallocated, equally large buffers of one file.

    One thread at a time writes a buffer; others may read any of them meanwhile and find out by the
    checksums what they read.
    """

    MAGIC = b"MOEVRING"

    def __init__(self, path: Path, header: Mapping[str, Any], mapping: mmap.mmap) -> None:
        """Use `create` or `open`."""
        super().__init__(path, header, mapping)
        self.owner = LogicalRank.parse(header["owner"])
        self.shape = RingShape.out_of(header)
        self.capacity = self.shape.capacity
        self._descriptor_bytes = _descriptor_bytes(self.shape.max_parts)
        self._buffers_offset = self.shape.buffers_offset
        self._stride = page_aligned(self.shape.buffer_bytes)
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
        if min(sizes.values()) < 1:
            raise ValueError(
                f"no ring: {shape.capacity} x {shape.buffer_bytes} bytes, {shape.max_parts} parts"
            )
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

    def payload_offset(self, step: int) -> int:
        """Returns where in the file the payload of S_step begins."""
        return self._buffers_offset + self._place(step) * self._stride

    def buffer(self, step: int) -> memoryview:
        """Returns the buffer of S_step, to be filled between `invalidate` and `publish`."""
        start = self.payload_offset(step)
        return self.view[start : start + self.shape.buffer_bytes]

    def invalidate(self, step: int) -> None:
        """Forgets the slot in the buffer of S_step, whichever it is, before it is overwritten."""
        descriptor = self._descriptor(self._place(step))
        descriptor[: _GUARD.size] = bytes(_GUARD.size)
        self._damaged.pop(self._place(step), None)

    def publish(self, record: SlotRecord) -> None:
        """Declares a slot held whose payload is complete in its buffer.

        Raises:
            ValueError: the record does not fit into the ring.
        """
        body = encode_record(record)
        descriptor = self._descriptor(self._place(record.step))
        if record.payload_bytes > self.shape.buffer_bytes:
            raise ValueError(
                f"{record.payload_bytes} bytes in a buffer of {self.shape.buffer_bytes}"
            )
        if _GUARD.size + len(body) > len(descriptor):
            raise ValueError(
                f"{self.path} has room for slots of {self.shape.max_parts} parts, not of "
                f"{len(record.parts)}"
            )
        self.invalidate(record.step)
        guarded = struct.pack("<I", len(body)) + body
        descriptor[_CHECKSUM_BYTES : _CHECKSUM_BYTES + len(guarded)] = guarded
        descriptor[:_CHECKSUM_BYTES] = struct.pack("<Q", checksum_of(guarded))

    def has_room_for(self, record: SlotRecord) -> bool:
        """Returns whether a slot's payload and record fit."""
        return self.shape.has_room_for(record)

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
        return self.buffer(record.step)[: record.payload_bytes]

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
        fits = (
            record.payload_bytes <= self.shape.buffer_bytes and record.step % self.capacity == place
        )
        return record if fits else None
