# SPDX-License-Identifier: Apache-2.0
"""What a slot consists of: the record that stands beside its bytes, in files and on the wire."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Collection, Iterator
from typing import Any

from megatron_moevement.errors import MoEvementError
from megatron_moevement.policy.copies.slot_ring import Extent
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.slots.mapped_file import checksum_of

EXTRAS = "extras"
"""Name of the part with the scalars and the random state that a lost rank would take with it."""

NOWHERE = Extent(0, 0)
"""Of a slot that is in no ring yet."""

MAX_NAME_BYTES = 64
"""Room for a part's name; names may be longer where others are shorter."""

_HEAD = struct.Struct("<QQIIIQQQQI")
_PART = struct.Struct("<QQQH")
_MAX_UINT64 = 2**64 - 1
_MAX_UINT32 = 2**32 - 1


class MalformedRecordError(MoEvementError, ValueError):
    """Numbers or names that no slot has."""


@dataclasses.dataclass(frozen=True)
class SlotPart:
    """A contiguous piece of a slot with a checksum of its own.

    Attributes:
        name: the operator whose state it is, or `EXTRAS`.
        offset: of its first byte in the payload.
        checksum: of its bytes, made when they were captured.
    """

    name: str
    offset: int
    size_bytes: int
    checksum: int

    @classmethod
    def of(cls, name: str, offset: int, payload: memoryview) -> SlotPart:
        """Returns the part that consists of `payload`, with its checksum."""
        return cls(name, offset, payload.nbytes, checksum_of(payload))


@dataclasses.dataclass(frozen=True)
class SlotRecord:
    """One slot: which state it holds, and where in its payload each part lies.

    Attributes:
        rollbacks: how many rollbacks to a durable checkpoint lie behind the state.
        step: k, the payload holds the owner's part of S_k: `window.step_of(slot)`.
        parts: its pieces; what lies between them means nothing.
        extent: where it lies in the ring of its owner and in those of the holders, with the room
            behind it.

    Raises:
        MalformedRecordError: numbers that don't fit together, or a name twice.
    """

    rollbacks: int
    window: Window
    slot: int
    step: int
    payload_bytes: int
    parts: tuple[SlotPart, ...]
    extent: Extent = NOWHERE

    def __post_init__(self) -> None:
        small = (self.window.size, self.window.schedule_version, self.slot, len(self.parts))
        large = (self.rollbacks, self.window.start, self.step, self.payload_bytes, *self.extent)
        numbers = [*small, *large]
        for part in self.parts:
            numbers += (part.offset, part.size_bytes, part.checksum)
        # A bool passes as a number everywhere else: from the wire it would be an accident.
        if any(type(number) is not int or number < 0 for number in numbers):
            raise MalformedRecordError(f"a slot of negative or no numbers: {small + large}")
        if max(small) > _MAX_UINT32 or max(numbers) > _MAX_UINT64:
            raise MalformedRecordError(f"a slot of numbers too large: {small + large}")
        if self.slot >= self.window.size or self.step != self.window.step_of(self.slot):
            raise MalformedRecordError(
                f"slot {self.slot} of {self.window} does not hold the state of step {self.step}"
            )
        for part in self.parts:
            if part.offset + part.size_bytes > self.payload_bytes:
                raise MalformedRecordError(f"{part} lies outside of {self.payload_bytes} bytes")
        if len({part.name for part in self.parts}) != len(self.parts):
            raise MalformedRecordError("two parts of a slot have the same name")

    def part(self, name: str) -> SlotPart:
        """Returns a part by its name.

        Raises:
            KeyError: the slot has no such part.
        """
        for part in self.parts:
            if part.name == name:
                return part
        raise KeyError(name)

    @property
    def operators_bytes(self) -> int:
        """What it takes without the extras, which lie behind all else."""
        extras = (part.offset for part in self.parts if part.name == EXTRAS)
        return next(extras, self.payload_bytes)

    @property
    def is_empty(self) -> bool:
        """Whether it has no operator: scalars alone, whose transfer tells of latencies."""
        return all(part.name == EXTRAS for part in self.parts)

    def names_in(self, start: int, stop: int) -> Iterator[str]:
        """Yields the names of the parts that have bytes in a range of the payload."""
        for part in self.parts:
            if part.offset < stop and start < part.offset + part.size_bytes:
                yield part.name

    def damaged_parts(self, payload: memoryview, intact: Collection[str] = ()) -> tuple[str, ...]:
        """Returns the names of the parts whose bytes are not those that were captured.

        Args:
            intact: parts that need not be read.
        """
        return tuple(
            part.name
            for part in self.parts
            if part.name not in intact
            and checksum_of(payload[part.offset : part.offset + part.size_bytes]) != part.checksum
        )


def max_record_bytes(max_parts: int) -> int:
    """Returns the room that the encoding of a record with so many parts may take."""
    return _HEAD.size + max_parts * (_PART.size + MAX_NAME_BYTES)


def encode_record(record: SlotRecord) -> bytes:
    """Returns a record as bytes."""
    place = (record.rollbacks, *record.window, record.slot, record.step)
    pieces = [_HEAD.pack(*place, record.payload_bytes, *record.extent, len(record.parts))]
    for part in record.parts:
        name = part.name.encode()
        pieces += (_PART.pack(part.offset, part.size_bytes, part.checksum, len(name)), name)
    return b"".join(pieces)


def decode_record(data: bytes) -> SlotRecord:
    """Returns the record of bytes that `encode_record` made; their checksum was looked at before.

    Raises:
        MalformedRecordError: they hold no record.
    """
    try:
        *numbers, count = _HEAD.unpack_from(data)
        rollbacks, *window, slot, step, payload_bytes, start, room_bytes = numbers
        parts = []
        at = _HEAD.size
        for _ in range(count):
            offset, size_bytes, checksum, length = _PART.unpack_from(data, at)
            at += _PART.size
            parts.append(SlotPart(data[at : at + length].decode(), offset, size_bytes, checksum))
            at += length
    except (struct.error, UnicodeDecodeError) as error:
        raise MalformedRecordError(str(error)) from error
    place = (rollbacks, Window(*window), slot, step)
    return SlotRecord(*place, payload_bytes, tuple(parts), Extent(start, room_bytes))


def record_document(record: SlotRecord) -> dict[str, Any]:
    """Returns a record as what JSON can hold; checksums are hexadecimal digits."""
    return {
        "era": record.rollbacks,
        "window": record.window.document,
        "slot": record.slot,
        "step": record.step,
        "payload_bytes": record.payload_bytes,
        "extent": list(record.extent),
        "parts": [
            [part.name, part.offset, part.size_bytes, f"{part.checksum:016x}"]
            for part in record.parts
        ],
    }


def record_of_document(document: Any) -> SlotRecord:
    """Returns the record of a document that anybody may have written.

    Raises:
        MalformedRecordError: it describes no slot.
    """
    try:
        window = document["window"]
        return SlotRecord(
            rollbacks=document["era"],
            window=Window(window["start"], window["size"], window["epoch"]),
            slot=document["slot"],
            step=document["step"],
            payload_bytes=document["payload_bytes"],
            parts=tuple(_part_of(each) for each in document["parts"]),
            extent=Extent(*document["extent"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MalformedRecordError(f"no slot record: {error!r}") from error


def _part_of(document: Any) -> SlotPart:
    name, offset, size_bytes, checksum = document
    if not isinstance(name, str):
        raise MalformedRecordError(f"no name: {name!r}")
    return SlotPart(name, offset, size_bytes, int(checksum, 16))
