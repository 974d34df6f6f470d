# SPDX-License-Identifier: Apache-2.0
"""A rank's part of a tier: what its journal says, and its slots of the window.

Two files: the bytes of slots and losses, one after the other, and JSON that describes them. The
second has the checksums of what is in the first, and its own in its name. A slot is written as soon
as it has been captured, so that little is left to write once the window is persisted.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, Any

import numpy as np
import xxhash

from megatron_moevement.errors import MoEvementError
from megatron_moevement.policy.copies.journal_state import JournalState
from megatron_moevement.policy.document import Document
from megatron_moevement.policy.job.guarantee import Computation
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.tiers.tier import PartName, TierName
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.slots.mapped_file import checksum_of, checksum_of_pieces
from megatron_moevement.runtime.slots.ring_file import RingFile
from megatron_moevement.runtime.slots.slot_record import (
    MalformedRecordError,
    SlotPart,
    SlotRecord,
    record_document,
    record_of_document,
)
from megatron_moevement.runtime.slots.store_identity import StoreIdentity
from megatron_moevement.runtime.tiers.target import Target

FORMAT_VERSION = 4
PIECE_BYTES = 1 << 20
"""Copied at a time, while other threads of the process go on."""
_MOST_BYTES = 1 << 30
"""Of a description: what says that it has more is none."""


class LostSlotError(MoEvementError):
    """A slot is not there any more, or its bytes are not those that were captured."""


class DamagedPartError(MoEvementError):
    """A part does not read as it was written."""


@dataclasses.dataclass(frozen=True)
class WindowSlots:
    """Where the slots of a window lie, from the first that is captured on.

    Attributes:
        tier: to which they are written.
        ring: training overwrites them there, in the end.
    """

    tier: TierName
    window: Window
    ring: RingFile

    def record(self, step: int) -> SlotRecord | None:
        """Returns the record of the slot of S_step; None where the ring does not hold it.

        Raises:
            ValueError: the ring is closed.
        """
        record = self.ring.record(step)
        own = (self.window, self.tier.rollbacks)
        return None if record is None or (record.window, record.rollbacks) != own else record


@dataclasses.dataclass(frozen=True)
class Author(Document):
    """The rank that wrote a part.

    Attributes:
        computation: what decided its bits.
        host: the name of its machine.
        fingerprint: of what the bytes of its slots mean, whatever machines they are on.
    """

    computation: Computation
    host: str
    fingerprint: str


@dataclasses.dataclass(frozen=True)
class Told:
    """What a rank has to tell besides its slots when a window is persisted, but for the losses.

    Attributes:
        state: of its journal, as the two after it.
        entries: ledger entries by their steps, as many as are retained.
        schedules: that the state names, by their digests.
    """

    state: JournalState
    entries: Mapping[int, bytes]
    schedules: Mapping[str, bytes]
    author: Author


@dataclasses.dataclass(frozen=True)
class Part:
    """What the description of a part says.

    Attributes:
        slots: of the window, one for each of its steps.
        loss_bytes: how many bytes of losses lie after the slots.
        loss_checksum: theirs; each part of a slot has its own.
    """

    owner: LogicalRank
    identity: StoreIdentity
    told: Told
    slots: tuple[SlotRecord, ...]
    loss_bytes: int
    loss_checksum: int

    def encoded(self) -> bytes:
        """Returns it as the bytes of its file."""
        told = self.told
        document = {
            "format": FORMAT_VERSION,
            "owner": str(self.owner),
            "identity": self.identity.document(),
            "state": told.state.document(),
            "entries": [[step, told.entries[step].decode()] for step in sorted(told.entries)],
            "schedules": {digest: data.hex() for digest, data in told.schedules.items()},
            "author": told.author.document(),
            "slots": [record_document(record) for record in self.slots],
            "loss_bytes": self.loss_bytes,
            "loss_checksum": f"{self.loss_checksum:016x}",
        }
        return json.dumps(document).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Part:
        """Returns the part of bytes whose checksum was right.

        Raises:
            DamagedPartError: they describe none, or one of another format.
        """
        try:
            document: dict[str, Any] = json.loads(data)
            if document["format"] != FORMAT_VERSION:
                raise DamagedPartError(
                    f"format {document['format']}, this version reads {FORMAT_VERSION}"
                )
            schedules = document["schedules"].items()
            told = Told(
                JournalState.of_document(document["state"]),
                {int(step): text.encode() for step, text in document["entries"]},
                {digest: bytes.fromhex(text) for digest, text in schedules},
                Author.of_document(document["author"]),
            )
            return cls(
                LogicalRank.parse(document["owner"]),
                StoreIdentity.of_document(document["identity"]),
                told,
                tuple(record_of_document(each) for each in document["slots"]),
                int(document["loss_bytes"]),
                int(document["loss_checksum"], 16),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedPartError(f"no part of a tier: {error!r}") from error


def data_name(tier: TierName, rank: LogicalRank) -> str:
    """Returns the name of the file with the bytes of a rank's part."""
    return f"{tier}/{rank}.slots"


def write_part(
    target: Target,
    slots: WindowSlots,
    *,
    await_slot: Callable[[int], None],
    await_persisted: Callable[[], tuple[Told, Iterable[bytes]]],
    proceed: Callable[[], None],
) -> PartName:
    """Writes the part of a rank; what can't be written in whole is not there.

    Args:
        await_slot: returns when the slot of a step has been captured, or is gone.
        await_persisted: returns when the window is persisted: what a journal says then, and the
            losses up to its step, as a journal has them.
        proceed: is called before each piece; raises what ends the writing.

    Raises:
        LostSlotError: training needed a buffer before it was read, or a slot is damaged.
        Exception: the target refuses.
    """
    ring, window = slots.ring, slots.window
    name, digest = data_name(slots.tier, ring.owner), xxhash.xxh3_64()
    records, loss_bytes, scratch = [], 0, memoryview(bytearray(PIECE_BYTES))
    with target.create(name) as file:
        for step in range(window.start, window.last + 1):
            await_slot(step)
            record = _held(slots, step)
            for piece in _pieces(ring, record, scratch, proceed):
                file.write(piece)
            records.append(record)
            target.sync(file)
        told, losses = await_persisted()
        for some in losses:
            digest.update(some)
            file.write(some)
            loss_bytes += len(some)
    part = Part(ring.owner, ring.identity, told, tuple(records), loss_bytes, digest.intdigest())
    encoded = part.encoded()
    size_bytes = sum(each.size_bytes for record in records for each in record.parts)
    written = PartName(ring.owner, checksum_of(encoded), size_bytes)
    try:
        with target.create(f"{slots.tier}/{written}") as file:
            file.write(encoded)
    except BaseException:
        target.remove(name)
        raise
    return written


def _held(slots: WindowSlots, step: int) -> SlotRecord:
    record = slots.record(step)
    if record is None:
        raise LostSlotError(f"the slot of step {step} was overwritten before it was read")
    return record


def _pieces(
    ring: RingFile, record: SlotRecord, scratch: memoryview, proceed: Callable[[], None]
) -> Iterator[memoryview]:
    """Yields the bytes of a slot's parts; after each part it is sure that they were its own.

    Args:
        scratch: for a copy of each piece: the ring can be closed however long its writing takes.

    Raises:
        LostSlotError: they were not.
    """
    for part in record.parts:
        digest, end = xxhash.xxh3_64(), part.offset + part.size_bytes
        for start in range(part.offset, end, PIECE_BYTES):
            proceed()
            piece = scratch[: min(PIECE_BYTES, end - start)]
            _copy(ring.payload(record)[start : start + len(piece)], piece)
            digest.update(piece)
            yield piece
        if digest.intdigest() != part.checksum:
            why = "is damaged in memory"
            if ring.record(record.step) != record:
                why = "was overwritten before it was read"
            raise LostSlotError(f"{part.name} in the slot of step {record.step} {why}")


def _copy(source: memoryview, target: memoryview) -> None:
    """Copies bytes while other threads go on, as they do not where Python itself copies."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def read_part(target: Target, tier: TierName, name: PartName) -> Part:
    """Returns what describes a part.

    Raises:
        DamagedPartError: it does not read as it was written, or is not there.
        Exception: the target refuses.
    """
    try:
        with target.read(f"{tier}/{name}") as file:
            data = file.read(_MOST_BYTES)
    except FileNotFoundError as error:
        raise DamagedPartError(f"{name} is missing") from error
    if checksum_of(data) != name.checksum:
        raise DamagedPartError(f"{name} has another checksum than its name has")
    part = Part.decoded(data)
    if part.owner != name.rank:
        raise DamagedPartError(f"{name} is of {part.owner}")
    return part


def load_slots(target: Target, tier: TierName, part: Part, ring: RingFile, rollbacks: int) -> bytes:
    """Puts the slots of a part into a ring, where each counts once all of it is there.

    Args:
        ring: empty, with room for them.
        rollbacks: that lie behind the history that goes on with them.

    Returns:
        The losses, as a journal has them.

    Raises:
        DamagedPartError: bytes are not those that were captured; some slots may be in the ring.
        Exception: the target refuses.
    """
    try:
        with target.read(data_name(tier, part.owner)) as file:
            for record in part.slots:
                payload = ring.reserve(record.step, ring.shape.extent_bytes(record.operators_bytes))
                for each in record.parts:
                    _load(file, each, payload)
                ring.publish(dataclasses.replace(record, rollbacks=rollbacks))
            losses = _read(file, part.loss_bytes)
    except (FileNotFoundError, MalformedRecordError) as error:
        raise DamagedPartError(f"the slots of {part.owner}: {error}") from error
    _check_losses(part, losses)
    return losses


def check_slots(target: Target, tier: TierName, part: Part) -> None:
    """Reads all slots and losses of a part, and keeps none of them.

    Raises:
        DamagedPartError: bytes are not those that were captured.
        Exception: the target refuses.
    """
    try:
        with target.read(data_name(tier, part.owner)) as file:
            for record in part.slots:
                for each in record.parts:
                    _check(each, checksum_of_pieces(_read_pieces(file, each)))
            _check_losses(part, _read(file, part.loss_bytes))
    except FileNotFoundError as error:
        raise DamagedPartError(f"the slots of {part.owner}: {error}") from error


def _check(part: SlotPart, checksum: int) -> None:
    if checksum != part.checksum:
        raise DamagedPartError(f"{part.name} has another checksum than when it was captured")


def _check_losses(part: Part, losses: bytes) -> None:
    if checksum_of(losses) != part.loss_checksum:
        raise DamagedPartError(f"the losses of {part.owner} have another checksum")


def _read_pieces(file: IO[bytes], part: SlotPart) -> Iterator[bytes]:
    for start in range(0, part.size_bytes, PIECE_BYTES):
        yield _read(file, min(PIECE_BYTES, part.size_bytes - start))


def _load(file: IO[bytes], part: SlotPart, payload: memoryview) -> None:
    place, start = payload[part.offset : part.offset + part.size_bytes], 0
    for piece in _read_pieces(file, part):
        place[start : start + len(piece)] = piece
        start += len(piece)
    _check(part, checksum_of(place))


def _read(file: IO[bytes], size_bytes: int) -> bytes:
    pieces = []
    while size_bytes > 0:
        piece = file.read(size_bytes)
        if not piece:
            raise DamagedPartError("the file of the slots is too short")
        pieces.append(piece)
        size_bytes -= len(piece)
    return b"".join(pieces)
