# SPDX-License-Identifier: Apache-2.0
"""The file of events of one process: whole lines, written by a thread beside training, bounded.

A file that has become large is put aside as a part with a number, and a new one is begun. Of the
oldest parts the account's share is kept alone, in one file for all of them. A part whose numbers
are among those of another one is a leftover, and does not count. Standard library only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import queue
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from megatron_moevement.policy.accounting.compaction import compacted
from megatron_moevement.policy.accounting.event import EventRecord
from megatron_moevement.runtime.closing import Closing

logger = logging.getLogger(__name__)

NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_SUFFIX = ".jsonl"
_PART = re.compile(r"\.part(\d+)(?:-(\d+))?$")
_WHOLE_PARTS = 3
"""Parts of which everything is kept; each of them, and the file, has a fourth of the room."""
_MOST_LINES = 1024
_MOST_AT_ONCE = 64
PATIENCE_S = 5.0
"""A folder that does not answer holds up what happens for so long; the line is written later."""
_SLICE_S = 0.05
"""Of a wait, in which no interrupt arrives."""

_Ticket = queue.SimpleQueue[None]
_Waiting = tuple[bytes, _Ticket | None]
_own_files: dict[tuple[str, int], Path] = {}
"""By folder and process: the file that the process writes there, in all its generations."""
_stuck: dict[tuple[str, int], EventFile] = {}
"""By the same: the file whose thread still waited for the folder when it was closed."""


def waits_for(directory: str | Path) -> bool:
    """Returns whether events of this process still wait for a folder that does not answer."""
    found = _stuck.get(_stuck_key(directory))
    return found is not None and not found.is_over


def _stuck_key(directory: str | Path) -> tuple[str, int]:
    """Returns what names a folder and this process, without a look at the folder."""
    return os.path.abspath(directory), os.getpid()


class EventFile(Closing):
    """Appends lines to the file of this process; any thread writes.

    Raises:
        OSError: the file can't be opened.
    """

    def __init__(
        self, directory: Path, most_bytes: int, read: Callable[[Path], Iterable[EventRecord]]
    ) -> None:
        """Opens it.

        Args:
            most_bytes: of the file and its parts; what the account needs may exceed it.
            read: returns the events of a file.
        """
        self._read = read
        self._part_bytes = most_bytes // (_WHOLE_PARTS + 1)
        self._stuck_key = _stuck_key(directory)
        self._lines: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_over = False
        self._is_abandoned = False
        self._handing_over = threading.Lock()
        self._over: _Ticket = queue.SimpleQueue()
        self._left_out = 0
        self.path, descriptor = _own_file(directory)
        self._descriptor: int | None = descriptor

    def start(self) -> None:
        """Starts the thread that writes; without it who emits an event does. Nothing interrupts."""
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether lines are written: not after the end, nor after a disk has failed."""
        return self._descriptor is not None and not self._is_abandoned

    @property
    def is_over(self) -> bool:
        """Whether the thread has ended."""
        return self._is_over

    @property
    def is_behind(self) -> bool:
        """Whether so much waits that what can wait longer, or is not needed, should not come."""
        return self._lines.qsize() >= _MOST_LINES

    def write(self, line: bytes) -> None:
        """Writes a line before it returns, unless the folder does not answer."""
        ticket: _Ticket = queue.SimpleQueue()
        if self._thread is None:
            self._append(line)
            return
        self._lines.put((line, ticket))  # after what waits
        until_s = time.monotonic() + PATIENCE_S
        while not self._is_over:
            with contextlib.suppress(queue.Empty):
                ticket.get(timeout=_SLICE_S)
                return
            if time.monotonic() > until_s:
                return
        self._write_rest()

    def leave_out(self) -> None:
        """Counts an event that is not written because too many wait."""
        self._left_out += 1

    def write_later(self, line: bytes) -> None:
        """Lets the thread write a line soon, after what waits."""
        if self._thread is None:
            self._append(line)
            return
        self._lines.put((line, None))

    def give_up(self, reason: str | None) -> None:
        """Ends the recording with a line; training goes on."""
        self._let_go()
        logger.warning("%s: %s; no more events are recorded", self.path, reason)

    def close(self) -> None:
        """Writes what waits, and closes the file; closing twice is fine.

        A folder that does not answer is left to the thread, which closes the file when it does.
        """
        if self._is_abandoned:
            return
        if self._thread is not None:
            self._lines.put(None)
            until_s = time.monotonic() + PATIENCE_S
            while not self._is_over:  # an interrupted `join` takes its thread for ended
                if time.monotonic() > until_s:
                    self._abandon()
                    return
                with contextlib.suppress(queue.Empty):
                    self._over.get(timeout=_SLICE_S)
            self._thread.join()
        self._write_rest()
        self._let_go()
        if self._left_out:
            logger.warning("%s: %d events were left out: %s", *(self.path, self._left_out, _SLOW))
            self._left_out = 0

    def _abandon(self) -> None:
        _stuck[self._stuck_key] = self
        with self._handing_over:
            self._is_abandoned = True
            is_over = self._is_over
        if is_over:
            self._let_go()
        logger.warning(
            "%s: the folder does not answer; no more events are recorded until it does", self.path
        )

    def _run(self) -> None:
        try:
            while (first := self._lines.get()) is not None and self._write_from(first):
                pass
        finally:
            with self._handing_over:
                self._is_over = True
                is_abandoned = self._is_abandoned
            self._over.put(None)
            if is_abandoned:
                self._let_go()

    def _write_rest(self) -> None:
        """Writes what waits where no thread is left to do it."""
        with contextlib.suppress(queue.Empty):
            while (first := self._lines.get_nowait()) is not None and self._write_from(first):
                pass

    def _write_from(self, first: _Waiting) -> bool:
        """Writes a line with some of those that wait; returns whether more may come."""
        together, is_last = [first], False
        with contextlib.suppress(queue.Empty):
            while not is_last and len(together) < _MOST_AT_ONCE:
                following = self._lines.get_nowait()
                is_last = following is None
                together += [] if following is None else [following]
        self._append(b"".join(line for line, _ in together))
        self._put_aside()
        for _, ticket in together:
            if ticket is not None:
                ticket.put(None)
        return not is_last

    def _append(self, data: bytes) -> None:
        descriptor = self._descriptor
        if descriptor is None or not data:
            return
        try:
            if os.write(descriptor, data) != len(data):
                self.give_up("the disk is full")
        except OSError as error:
            self.give_up(error.strerror)

    def _put_aside(self) -> None:
        """Begins a new file where the present one is large; no other thread writes meanwhile."""
        descriptor = self._descriptor
        try:
            if descriptor is not None and os.fstat(descriptor).st_size > self._part_bytes:
                self._begin_another(descriptor)
        except (OSError, ValueError) as error:
            self.give_up(getattr(error, "strerror", None) or str(error))

    def _begin_another(self, descriptor: int) -> None:
        """Puts the file aside, and keeps of the oldest parts what the account needs."""
        parts = parts_of(self.path)
        number = max((part.last for part in parts), default=-1) + 1
        whole = [*(part for part in parts if not part.is_compact), Part(self.path, number, None)]
        os.rename(self.path, whole[-1].path)
        self._descriptor = os.open(self.path, NEW_FILE | os.O_APPEND, 0o644)
        os.close(descriptor)
        old = whole[:-_WHOLE_PARTS]
        if not old:
            return
        old = [*(part for part in parts if part.is_compact), *old]
        together = Part(self.path, old[0].first, old[-1].last)
        partial = self.path.with_name(f".{self.path.stem}.partial")
        partial.unlink(missing_ok=True)
        with open(os.open(partial, NEW_FILE, 0o644), "w", encoding="utf-8") as file:
            file.writelines(
                line_of(record) for record in compacted(self._records_of(part.path for part in old))
            )
        os.replace(partial, together.path)
        for part in old:
            part.path.unlink(missing_ok=True)

    def _records_of(self, paths: Iterable[Path]) -> Iterator[EventRecord]:
        for path in paths:
            yield from self._read(path)

    def _let_go(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


_SLOW = "the folder took them too slowly; --moevement-event-interval makes them fewer"


@dataclasses.dataclass(frozen=True)
class Part:
    """A part that was put aside.

    Attributes:
        of: the path of the file whose part it is.
        first: number of the oldest part that it stands for.
        end: number of the newest one; None where it is a part as it was written.
    """

    of: Path
    first: int
    end: int | None

    @property
    def last(self) -> int:
        """Number of the newest part that it stands for."""
        return self.first if self.end is None else self.end

    @property
    def is_compact(self) -> bool:
        """Whether it has only what the account needs."""
        return self.end is not None

    @property
    def path(self) -> Path:
        """Where it lies."""
        numbers = f"{self.first}" if self.end is None else f"{self.first}-{self.end}"
        return self.of.with_name(f"{self.of.stem}.part{numbers}{_SUFFIX}")


def files_in(directory: Path) -> dict[Path, list[Part]]:
    """Returns the file of each process, which may have no more than parts, with them, in order."""
    return _files_of(directory, _names_in(directory))


def parts_of(path: Path) -> list[Part]:
    """Returns the parts of a file in the order of time, without leftovers."""
    prefix = f"{path.stem}.part"
    names = [name for name in _names_in(path.parent) if name.startswith(prefix)]
    return _files_of(path.parent, names).get(path, [])


def _names_in(directory: Path) -> list[str]:
    try:
        return [name for name in os.listdir(directory) if name.endswith(_SUFFIX)]
    except FileNotFoundError:
        return []


def _files_of(directory: Path, names: Iterable[str]) -> dict[Path, list[Part]]:
    found: dict[str, list[Part]] = {}
    for name in names:
        stem = name.removesuffix(_SUFFIX)
        match = _PART.search(stem)
        parts = found.setdefault(stem if match is None else stem[: match.start()], [])
        if match is not None:
            path = directory / f"{stem[: match.start()]}{_SUFFIX}"
            end = None if match[2] is None else int(match[2])
            parts.append(Part(path, int(match[1]), end))
    return {
        directory / f"{stem}{_SUFFIX}": list(_without_leftovers(parts))
        for stem, parts in sorted(found.items())
    }


def _without_leftovers(parts: Iterable[Part]) -> Iterator[Part]:
    until = -1
    for part in sorted(parts, key=lambda one: (one.first, -one.last, not one.is_compact)):
        if part.last > until:
            yield part
            until = part.last


def line_of(record: EventRecord) -> str:
    """Returns an event as its file has it."""
    common = {field: getattr(record, field) for field in _common_fields()}
    common["event"] = record.event.value
    return json.dumps({**common, **record.fields}, allow_nan=False) + "\n"


@functools.cache
def _common_fields() -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(EventRecord) if f.name != "fields")


def _own_file(directory: Path) -> tuple[Path, int]:
    """Returns the file of this process in a folder, open: a new one at first, then the same."""
    key = (str(directory.resolve()), os.getpid())
    if (known := _own_files.get(key)) is not None:
        with contextlib.suppress(FileNotFoundError):
            return known, _open_for_appending(known)
    # Neither host nor process number are of one process alone where containers write.
    name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
    path = _own_files[key] = directory / name
    return path, os.open(path, NEW_FILE | os.O_APPEND, 0o644)


def _open_for_appending(path: Path) -> int:
    """Opens a file of whole lines; a line that a full disk cut short before is ended."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")
    return descriptor
