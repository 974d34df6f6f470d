# SPDX-License-Identifier: Apache-2.0
"""The tail of a folder of events: what its processes have recorded since the last look."""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_moevement.policy.accounting.event import EventRecord
from megatron_moevement.runtime.observation.event_file import Part, files_in, parts_of
from megatron_moevement.runtime.observation.events import event_of_line, steps_of_another


@dataclasses.dataclass
class _Place:
    """How far a file was read: by its number in the file system, as it may be put aside."""

    inode: int = 0
    offset: int = 0


@dataclasses.dataclass(frozen=True)
class _Seen:
    """The file of a process, with the parts before it, when the folder was looked at."""

    path: Path
    inode: int | None
    parts: Sequence[Part]


class EventTail:
    """Reads a folder of events on and on, from its beginning; one thread uses it.

    It holds two lines of each file at a time.
    """

    def __init__(self, directory: Path) -> None:
        """Has read nothing; the folder need not be there yet."""
        self._directory = directory
        self._places: dict[Path, _Place] = {}

    def news(self) -> Iterator[tuple[str, EventRecord]]:
        """Yields what was recorded since the last look, each with the name of its process's file.

        They are in about the order of time. Lines that are no events, or not whole yet, are left
        out; the latter come later. Of steps of another rank than the first that no other event
        comes between, the newest are enough.
        """
        inodes = {path: _inode_and_size(path)[0] for path in files_in(self._directory)}
        parts = files_in(self._directory)  # those of before are among them
        news = [
            self._news_of(_Seen(path, inode, parts.get(path, []))) for path, inode in inodes.items()
        ]
        return heapq.merge(*news, key=lambda one: one[1].time)

    def _news_of(self, seen: _Seen) -> Iterator[tuple[str, EventRecord]]:
        place, name = self._places.setdefault(seen.path, _Place()), str(seen.path)
        for one in _unread(seen, place):
            with contextlib.suppress(FileNotFoundError):
                for line in _read_on(one, place):
                    record = event_of_line(line)
                    if record is not None:
                        yield name, record


def _unread(seen: _Seen, place: _Place) -> list[Path]:
    """Returns the files of a process that may have something new, in the order of time."""
    path = seen.path
    inode, size_bytes = _inode_and_size(path)
    if place.inode and place.inode == inode:
        return [] if place.offset == size_bytes else [path]
    parts = seen.parts if inode == seen.inode else parts_of(path)
    files = [*(part.path for part in parts), path]
    if not place.inode:
        return files
    inodes = [_inode_and_size(one)[0] for one in files]
    # Where it is not among them it has become a sum: what follows can't be told from it.
    return files[inodes.index(place.inode) :] if place.inode in inodes else [path]


def _inode_and_size(path: Path) -> tuple[int | None, int]:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None, 0
    return status.st_ino, status.st_size


def _read_on(path: Path, place: _Place) -> Iterator[bytes]:
    """Yields the whole lines after a place that are not replaced by the next, and moves it."""
    with path.open("rb") as file:
        inode = os.fstat(file.fileno()).st_ino
        if place.inode != inode:
            place.inode, place.offset = inode, 0
        file.seek(place.offset)
        former, former_whose = b"", None
        for line in file:
            if not line.endswith(b"\n"):
                break
            whose = steps_of_another(line)
            if former and (whose is None or whose != former_whose):
                yield former
            place.offset += len(line)
            former, former_whose = line, whose
        if former:
            yield former
