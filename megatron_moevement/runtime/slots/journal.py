# SPDX-License-Identifier: Apache-2.0
"""What one process knows, in a file that a kill at any instruction leaves old or new, never mixed.

After the header page come two copies of the superblock, written one after the other; then places
for window schedules; then, for each retained step, two places for its ledger entry; then the loss
of every step. Everything carries
the number of the commit that wrote it, and counts once the superblock of that commit is there: an
entry goes to the place whose content nobody needs, then the superblock makes it count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from megatron_moevement.policy.copies.journal_state import JournalState
from megatron_moevement.policy.document import Document
from megatron_moevement.runtime.slots.mapped_file import (
    PAGE_BYTES,
    Access,
    MappedFile,
    checksum_of,
    page_aligned,
)
from megatron_moevement.runtime.slots.store_identity import DamagedFileError, StoreIdentity
from megatron_moevement.runtime.slots.superblock import (
    SUPERBLOCK_BYTES,
    SchedulePlaces,
    decode_superblock,
    encode_superblock,
)

__all__ = ["Journal", "JournalShape", "JournalState", "losses_of", "stored_state"]

_SUPERBLOCKS = (PAGE_BYTES, PAGE_BYTES + SUPERBLOCK_BYTES)
_SCHEDULES_OFFSET = PAGE_BYTES + page_aligned(2 * SUPERBLOCK_BYTES)
_CHECKSUM_BYTES = 8
_ENTRY = struct.Struct("<QQI")
"""After the checksum: number of the commit, step, length of the entry."""
_LOSS_BYTES = 8


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A ledger entry that counts: where it lies, and the commit that wrote it."""

    place: int
    sequence: int
    step: int


@dataclasses.dataclass(frozen=True)
class JournalShape(Document):
    """Sizes of a journal: retained steps, bytes of an entry, the last step, bytes of a schedule."""

    retained_steps: int
    entry_bytes: int
    last_step: int
    schedule_bytes: int = 0

    @property
    def place_bytes(self) -> int:
        """Bytes of the place of an entry."""
        return -(-(_CHECKSUM_BYTES + _ENTRY.size + self.entry_bytes) // 8) * 8

    @property
    def entries_offset(self) -> int:
        """Where in the file the entries begin."""
        return _SCHEDULES_OFFSET + SchedulePlaces.total_bytes(self.schedule_bytes)

    @property
    def losses_offset(self) -> int:
        """Where in the file the losses begin."""
        return self.entries_offset + page_aligned(2 * self.retained_steps * self.place_bytes)

    @property
    def total_bytes(self) -> int:
        """Bytes of the file: what has to be announced before it is created."""
        return self.losses_offset + (self.last_step + 1) * _LOSS_BYTES


class Journal(MappedFile):
    """State, ledger entries of the newest steps, and loss history of one process.

    One thread at a time uses it.
    """

    MAGIC = b"MOEVJRNL"

    def __init__(self, path: Path, header: Mapping[str, Any], mapping: mmap.mmap) -> None:
        """Use `create` or `open`."""
        super().__init__(path, header, mapping)
        self.shape = JournalShape.out_of(header)
        self._place_bytes, self._losses_offset = self.shape.place_bytes, self.shape.losses_offset
        self._schedules = SchedulePlaces(
            lambda: self.view, _SCHEDULES_OFFSET, self.shape.schedule_bytes
        )
        self._sequence, self._state = self._newest_superblock()
        self._entries: dict[int, _Entry] = {}
        for entry in self._stored_entries():
            if self._counts_more(entry):
                self._entries[entry.step % self.shape.retained_steps] = entry

    @classmethod
    def create(
        cls,
        path: Path,
        identity: StoreIdentity,
        shape: JournalShape,
        *,
        state: JournalState | None = None,
        losses: Mapping[int, float] | None = None,
        schedules: Mapping[str, bytes] | None = None,
    ) -> Journal:
        """Creates a journal in place of the file of that name; its bytes are reserved.

        Args:
            losses: of the steps before; the former file is there until all of it is written.
            schedules: that the state names.

        Raises:
            UserError: the file system is too full, or refuses the file.
            ValueError: a size is less than one, or a step has no room for its loss.
        """
        last_step = shape.last_step
        if min(shape.retained_steps, shape.entry_bytes) < 1 or last_step < 0:
            raise ValueError(
                f"no journal: {shape.retained_steps} x {shape.entry_bytes} bytes, to {last_step}"
            )
        contents = dict.fromkeys(_SUPERBLOCKS, encode_superblock(0, state))
        history = bytearray((last_step + 1) * _LOSS_BYTES)
        for step, loss in (losses or {}).items():
            if not 0 <= step <= last_step:
                raise ValueError(f"{path} is made for {last_step} steps, not for {step}")
            history[step * _LOSS_BYTES : (step + 1) * _LOSS_BYTES] = _guarded_loss(
                step, struct.pack("<f", loss)
            )
        if losses:
            contents[shape.losses_offset] = bytes(history)
        places = bytearray(SchedulePlaces.total_bytes(shape.schedule_bytes))
        SchedulePlaces(lambda: memoryview(places), 0, shape.schedule_bytes).keep(
            schedules or {}, ()
        )
        contents[_SCHEDULES_OFFSET] = bytes(places)
        header, total_bytes = shape.document(), shape.total_bytes
        return cls._create(path, identity, header, total_bytes=total_bytes, contents=contents)

    def extended(self, last_step: int) -> Journal:
        """Returns the same journal with room for the losses of a longer run; closes this one.

        Raises:
            UserError: the file system is too full, or refuses the file.
        """
        shape = dataclasses.replace(self.shape, last_step=last_step)
        longer = self._create(
            self.path,
            self.identity,
            shape.document(),
            total_bytes=shape.total_bytes,
            contents={PAGE_BYTES: bytes(self.view[PAGE_BYTES:])},
        )
        self.close()
        return longer

    @property
    def state(self) -> JournalState | None:
        """The newest state; None before a first one was written."""
        return self._state

    def schedules(self) -> dict[str, bytes]:
        """Returns the window schedules that are there, by their digests."""
        return self._schedules.read()

    def keep_schedules(self, schedules: Mapping[str, bytes]) -> None:
        """Writes schedules that a state is to name; those that the present one names stay."""
        state = self._state
        named = frozenset[str]() if state is None else state.timetable.digests()
        self._schedules.keep(schedules, named)

    def write_state(self, state: JournalState) -> None:
        """Replaces the state alone; it may go back to an older step, as a rollback does."""
        self._write_superblock(self._sequence + 1, state)

    def commit(
        self, state: JournalState, step: int, entry: bytes, loss: float | None = None
    ) -> None:
        """Writes a step's ledger entry and loss, and the state, all at once or not at all.

        A replay writes the entry of a step again whose state is committed already. Going back is
        for `write_state`, before the steps that follow are written anew.

        Args:
            loss: of the step; None keeps what is there.

        Raises:
            ValueError: the entry is too large, or the step does not go with the state.
        """
        if len(entry) > self.shape.entry_bytes:
            raise ValueError(
                f"{self.path}: an entry of {len(entry)} bytes, "
                f"there is room for {self.shape.entry_bytes}"
            )
        if not max(-1, state.committed - self.shape.retained_steps) < step <= state.committed:
            raise ValueError(f"step {step} is not retained at step {state.committed}")
        if self._state is not None and state.committed < self._state.committed:
            raise ValueError(f"S_{self._state.committed} is followed by S_{state.committed}")
        if step > self.shape.last_step:
            raise ValueError(
                f"{self.path} was made for {self.shape.last_step} steps, not for {step}"
            )
        pair = step % self.shape.retained_steps
        former = self._entries.get(pair)
        place = 2 * pair if former is None else former.place ^ 1
        written = _Entry(place, self._sequence + 1, step)
        self._write_entry(written, entry)
        if loss is not None:
            self._write_loss(step, loss)
        self._write_superblock(written.sequence, state)
        self._entries[pair] = written
        # An entry that is damaged later must not uncover the one that it replaced.
        self._erase(place ^ 1)

    def entry(self, step: int) -> bytes:
        """Returns a ledger entry.

        Raises:
            KeyError: it is not retained, not committed, or damaged.
        """
        found = self._entries.get(step % self.shape.retained_steps)
        if found is None or found.step != step or self._state is None:
            raise KeyError(f"{self.path} has no entry of step {step}")
        stored = self._read(found.place)
        if stored is None or step > self._state.committed:
            raise KeyError(f"{self.path} has no entry of step {step}")
        return stored[1]

    def entries(self) -> range:
        """Returns the steps whose entries are there, up to the newest committed one without gap."""
        if self._state is None:
            return range(0)
        last = self._state.committed
        first = last + 1
        while first > 0 and self._holds(first - 1):
            first -= 1
        return range(first, last + 1)

    def losses(self) -> dict[int, float]:
        """Returns the loss of every committed step that has one, damaged ones left out."""
        if self._state is None:
            return {}
        return losses_of(self.loss_bytes(range(self._state.committed + 1)))

    def loss_bytes(self, steps: range) -> bytes:
        """Returns the losses of steps in a row as they are stored; any thread may call it."""
        start, stop = (
            self._losses_offset + step * _LOSS_BYTES for step in (steps.start, steps.stop)
        )
        return bytes(self.view[start : min(stop, self.shape.total_bytes)])

    def restore_losses(self, losses: Mapping[int, float]) -> None:
        """Takes over the loss history of a checkpoint, before the state of its step is written."""
        for step, loss in losses.items():
            self._write_loss(step, loss)

    def _newest_superblock(self) -> tuple[int, JournalState | None]:
        found = []
        for offset in _SUPERBLOCKS:
            block = bytes(self.view[offset : offset + SUPERBLOCK_BYTES])
            if (decoded := decode_superblock(block)) is not None:
                found.append(decoded)
        if not found:
            raise DamagedFileError(f"{self.path} has two damaged superblocks")
        return max(found, key=lambda decoded: decoded[0])

    def _write_superblock(self, sequence: int, state: JournalState) -> None:
        block = encode_superblock(sequence, state)
        for offset in _SUPERBLOCKS:
            self._write_guarded(offset, block)
        self._sequence, self._state = sequence, state

    def _write_guarded(self, offset: int, block: bytes) -> None:
        """Writes what begins with its checksum, the checksum last."""
        view = self.view
        view[offset + _CHECKSUM_BYTES : offset + len(block)] = block[_CHECKSUM_BYTES:]
        view[offset : offset + _CHECKSUM_BYTES] = block[:_CHECKSUM_BYTES]

    def _write_entry(self, entry: _Entry, data: bytes) -> None:
        guarded = _ENTRY.pack(entry.sequence, entry.step, len(data)) + data
        self._erase(entry.place)
        offset = self._place_offset(entry.place)
        self._write_guarded(offset, struct.pack("<Q", checksum_of(guarded)) + guarded)

    def _erase(self, place: int) -> None:
        offset = self._place_offset(place)
        size = _CHECKSUM_BYTES + _ENTRY.size
        self.view[offset : offset + size] = bytes(size)

    def _place_offset(self, place: int) -> int:
        return self.shape.entries_offset + place * self._place_bytes

    def _read(self, place: int) -> tuple[_Entry, bytes] | None:
        """Returns what is in a place, None for nothing, or something torn or damaged."""
        offset = self._place_offset(place)
        stored = bytes(self.view[offset : offset + self._place_bytes])
        (checksum,) = struct.unpack_from("<Q", stored)
        sequence, step, length = _ENTRY.unpack_from(stored, _CHECKSUM_BYTES)
        start = _CHECKSUM_BYTES + _ENTRY.size
        if (
            sequence == 0
            or length > self.shape.entry_bytes
            or step % self.shape.retained_steps != place // 2
        ):
            return None
        if checksum != checksum_of(stored[_CHECKSUM_BYTES : start + length]):
            return None
        return _Entry(place, sequence, step), stored[start : start + length]

    def _stored_entries(self) -> Iterator[_Entry]:
        for place in range(2 * self.shape.retained_steps):
            if (stored := self._read(place)) is not None:
                yield stored[0]

    def _counts_more(self, entry: _Entry) -> bool:
        """Whether an entry belongs to a commit that came to its end, and is the newest of its."""
        former = self._entries.get(entry.step % self.shape.retained_steps)
        newest = former is None or entry.sequence > former.sequence
        return newest and entry.sequence <= self._sequence

    def _holds(self, step: int) -> bool:
        found = self._entries.get(step % self.shape.retained_steps)
        return found is not None and found.step == step and self._read(found.place) is not None

    def _take_over(self, access: Access) -> None:
        """Ends what a kill cut: entries of no commit go, and the superblock's copies agree."""
        if access is not Access.WRITE:
            return
        for entry in list(self._stored_entries()):
            if self._entries.get(entry.step % self.shape.retained_steps) != entry:
                self._erase(entry.place)
        block = encode_superblock(self._sequence, self._state)
        for offset in _SUPERBLOCKS:
            if self.view[offset : offset + SUPERBLOCK_BYTES] != block:
                self._write_guarded(offset, block)

    def _write_loss(self, step: int, loss: float) -> None:
        if not 0 <= step <= self.shape.last_step:
            raise ValueError(
                f"{self.path} was made for {self.shape.last_step} steps, not for {step}"
            )
        offset = self._losses_offset + step * _LOSS_BYTES
        self.view[offset : offset + _LOSS_BYTES] = _guarded_loss(step, struct.pack("<f", loss))


def _guarded_loss(step: int, bits: bytes) -> bytes:
    """Returns the four bytes of a loss, and four that tell that it is one and of this step."""
    return bits + struct.pack("<I", xxhash.xxh32_intdigest(bits, seed=step & 0xFFFFFFFF))


def losses_of(stored: bytes) -> dict[int, float]:
    """Returns the losses in what `loss_bytes` returned of the steps from 0 on, by their steps.

    Damaged ones are left out.
    """
    found = {}
    for step in range(len(stored) // _LOSS_BYTES):
        one = stored[step * _LOSS_BYTES : (step + 1) * _LOSS_BYTES]
        if one == _guarded_loss(step, one[:4]):
            found[step] = float(struct.unpack("<f", one[:4])[0])
    return found


def stored_state(path: Path, identity: StoreIdentity | None) -> JournalState | None:
    """Returns the state that a journal has; None where there is no journal, or a damaged one.

    Raises:
        UserError: it is another job's.
    """
    try:
        journal = Journal.open(path, identity, Access.READ)
    except (FileNotFoundError, DamagedFileError):
        return None
    with contextlib.closing(journal):
        return journal.state
