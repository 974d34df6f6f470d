# SPDX-License-Identifier: Apache-2.0
"""What a process must remember: the superblock of a journal, and the schedules that it names."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection, Mapping

from megatron_moevement.policy.copies.journal_state import JournalState
from megatron_moevement.policy.window.timetable import MAX_ENTRIES
from megatron_moevement.runtime.slots.mapped_file import checksum_of, page_aligned

SUPERBLOCK_BYTES = 2048
_CHECKSUM = struct.Struct("<Q")
_HEAD = struct.Struct("<QI")
"""After the checksum: number of the commit, length of the JSON."""
_PLACE = struct.Struct("<64sI")
"""After the checksum: digest of the schedule, and length of what describes it."""
_PLACES = 2 * MAX_ENTRIES
"""For what the present state names and what the next one is to name."""


def encode_superblock(sequence: int, state: JournalState | None) -> bytes:
    """Returns the bytes of a superblock, which begin with their checksum.

    Args:
        sequence: number of the commit that writes it.
        state: None before a first one.
    """
    text = json.dumps(None if state is None else state.document()).encode()
    body = _HEAD.pack(sequence, len(text)) + text
    body_bytes = SUPERBLOCK_BYTES - _CHECKSUM.size
    if len(body) > body_bytes:
        raise ValueError(f"a state of {len(text)} bytes does not fit: {state}")
    body = body.ljust(body_bytes, b"\0")
    return _CHECKSUM.pack(checksum_of(body)) + body


def decode_superblock(block: bytes) -> tuple[int, JournalState | None] | None:
    """Returns number and state of a superblock, None for one that is torn or damaged."""
    body = block[_CHECKSUM.size :]
    if block[: _CHECKSUM.size] != _CHECKSUM.pack(checksum_of(body)):
        return None
    sequence, length = _HEAD.unpack_from(body)
    document = json.loads(body[_HEAD.size : _HEAD.size + length])
    return sequence, None if document is None else JournalState.out_of(document)


class SchedulePlaces:
    """Places for the schedules of two timetables; what no state names is overwritten."""

    def __init__(self, view: Callable[[], memoryview], offset: int, schedule_bytes: int) -> None:
        """Names where they lie.

        Args:
            view: returns the bytes of the file.
            offset: of the first place.
            schedule_bytes: the most that describes a schedule.
        """
        self._view = view
        self._offset = offset
        self._schedule_bytes = schedule_bytes

    @staticmethod
    def total_bytes(schedule_bytes: int) -> int:
        """Returns the bytes of all places."""
        return page_aligned(_PLACES * _place_bytes(schedule_bytes))

    def read(self) -> dict[str, bytes]:
        """Returns what is there, by the digests of the schedules."""
        found = (self._read(place) for place in range(_PLACES))
        return dict(filter(None, found))

    def keep(self, schedules: Mapping[str, bytes], named: Collection[str]) -> None:
        """Writes what is lacking, before a state is written that names it.

        Args:
            named: the digests that the present state names.

        Raises:
            ValueError: one is too large, or all places are taken by what the state names.
        """
        there = [self._read(place) for place in range(_PLACES)]
        digests = [None if one is None else one[0] for one in there]
        free = [place for place, one in enumerate(digests) if one not in {*named, *schedules}]
        for digest in sorted(schedules.keys() - set(digests)):
            if not free or len(schedules[digest]) > self._schedule_bytes:
                raise ValueError(f"no room for the schedule {digest}")
            self._write(free.pop(0), digest, schedules[digest])

    def _read(self, place: int) -> tuple[str, bytes] | None:
        """Returns what is in a place, None for nothing, or something torn or damaged."""
        start = self._begin(place)
        stored = bytes(self._view()[start : start + _place_bytes(self._schedule_bytes)])
        (checksum,) = _CHECKSUM.unpack_from(stored)
        digest, length = _PLACE.unpack_from(stored, _CHECKSUM.size)
        end = _CHECKSUM.size + _PLACE.size + length
        if (
            length == 0
            or end > len(stored)
            or checksum != checksum_of(stored[_CHECKSUM.size : end])
        ):
            return None
        return digest.rstrip(b"\0").decode(), stored[_CHECKSUM.size + _PLACE.size : end]

    def _write(self, place: int, digest: str, data: bytes) -> None:
        """Writes the checksum last: until then nothing is there."""
        view, start = self._view(), self._begin(place)
        body = _PLACE.pack(digest.encode(), len(data)) + data
        view[start : start + _CHECKSUM.size] = bytes(_CHECKSUM.size)
        view[start + _CHECKSUM.size : start + _CHECKSUM.size + len(body)] = body
        view[start : start + _CHECKSUM.size] = _CHECKSUM.pack(checksum_of(body))

    def _begin(self, place: int) -> int:
        return self._offset + place * _place_bytes(self._schedule_bytes)


def _place_bytes(schedule_bytes: int) -> int:
    return -(-(_CHECKSUM.size + _PLACE.size + schedule_bytes) // 8) * 8
