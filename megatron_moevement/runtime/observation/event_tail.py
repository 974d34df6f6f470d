# SPDX-License-Identifier: Apache-2.0
"""The tail of a folder of events: what its processes have recorded since the last look."""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import os
from collections.abc import Iterator
from pathlib import Path

from megatron_moevement.policy.accounting.event import EventRecord
from megatron_moevement.runtime.observation.event_file import files_in, parts_of
from megatron_moevement.runtime.observation.events import event_of_line


@dataclasses.dataclass
class _Place:
    """How far a file was read: by its number in the file system, as it may be put aside."""

    inode: int = 0
    offset: int = 0


class EventTail:
    """Reads a folder of events on and on, from its beginning; one thread uses it.

    It holds a line of each file at a time.
    """

    def __init__(self, directory: Path) -> None:
        """Has read nothing; the folder need not be there yet."""
        self._directory = directory
        self._places: dict[Path, _Place] = {}

    def news(self) -> Iterator[EventRecord]:
        """Yields what was recorded since the last look, in about the order of time.

        Lines that are no events, or not whole yet, are left out; the latter come later.
        """
        return (record for _, record in self.news_by_file())

    def news_by_file(self) -> Iterator[tuple[str, EventRecord]]:
        """Yields the same, each event with the name of its process's file."""
        files = files_in(self._directory)
        return heapq.merge(*map(self._news_of, files), key=lambda one: one[1].time)

    def _news_of(self, path: Path) -> Iterator[tuple[str, EventRecord]]:
        place = self._places.setdefault(path, _Place())
        for one in self._unread(path, place):
            with contextlib.suppress(FileNotFoundError):
                for record in _read_on(one, place):
                    yield str(path), record

    def _unread(self, path: Path, place: _Place) -> list[Path]:
        """Returns the files of a process that may have something new, in the order of time."""
        inode = _inode(path)
        if place.inode and place.inode == inode:
            return [path]
        files = [*(part.path for part in parts_of(path)), path]
        if not place.inode:
            return files
        inodes = [_inode(one) for one in files]
        # Where it is not among them it has become a sum: what follows can't be told from it.
        return files[inodes.index(place.inode) :] if place.inode in inodes else [path]


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def _read_on(path: Path, place: _Place) -> Iterator[EventRecord]:
    """Yields the whole lines after a place, and moves it."""
    with path.open("rb") as file:
        inode = os.fstat(file.fileno()).st_ino
        if place.inode != inode:
            place.inode, place.offset = inode, 0
        file.seek(place.offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            place.offset += len(line)
            record = event_of_line(line)
            if record is not None:
                yield record
