# SPDX-License-Identifier: Apache-2.0
"""Events of one process as JSON lines: what happened, when, and what it cost.

A record is one `write` to a file opened for appending, so records of several threads don't mix and
what was emitted survives the death of the process. Standard library only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from megatron_moevement.errors import UserError
from megatron_moevement.policy.accounting.event import EventName, EventRecord, History
from megatron_moevement.runtime.closing import Closing
from megatron_moevement.runtime.security.ownership import trusted_owners

__all__ = [
    "EventLog",
    "EventName",
    "EventRecord",
    "Events",
    "histories_in",
    "kept_documents",
    "open_events",
    "read_events",
]

logger = logging.getLogger(__name__)

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_own_files: dict[tuple[str, int], Path] = {}
"""By folder and process: the file that the process writes there, in all its generations."""
_EVENTS = frozenset(name.value for name in EventName)
_COMMON_FIELDS = [f.name for f in dataclasses.fields(EventRecord) if f.name != "fields"]


class Events(Closing):
    """Takes events and forgets them; any thread may emit."""

    def emit(self, event: EventName, iteration: int, **fields: Any) -> None:
        """Records that something happened; fields hold what JSON can hold."""

    def keep(self, kind: str, document: str) -> None:
        """Writes a document beside the events: all of it, or nothing."""

    def close(self) -> None:
        """Ends the recording."""


class EventLog(Events):
    """Writes the events of this process, in one generation, to its file.

    A disk that fails later ends the recording with one line on standard error: training goes on.

    Raises:
        UserError: the folder or the file can't be written.
    """

    def __init__(self, directory: str | Path, logical_rank: int, generation: int) -> None:
        self._place = {
            "logical_rank": logical_rank,
            "pid": os.getpid(),
            "generation": generation,
        }
        self._descriptor: int | None = None
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            if Path(directory).stat().st_uid not in trusted_owners():
                raise UserError(
                    f"--moevement-event-dir {directory} is another user's; give another one"
                )
            self._path, self._descriptor = _own_file(Path(directory))
        except OSError as error:
            raise UserError(
                f"--moevement-event-dir {directory}: {error.strerror}; give a writable folder"
            ) from error

    def emit(self, event: EventName, iteration: int, **fields: Any) -> None:
        """Writes one record."""
        descriptor = self._descriptor
        if descriptor is None:
            return
        record = {
            "time": time.time(),
            **self._place,
            "iteration": iteration,
            "event": event.value,
            **{name: _plain(value) for name, value in fields.items()},
        }
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        try:
            written = os.write(descriptor, line)
        except OSError as error:
            self._give_up(error.strerror)
            return
        if written != len(line):
            self._give_up("the disk is full")

    def keep(self, kind: str, document: str) -> None:
        """Writes a document to a new file, whose name begins with the time and ends with `kind`."""
        if self._descriptor is None:
            return
        name = f"{time.time_ns()}-{self._place['pid']}{_ending(kind)}"
        partial = self._path.with_name(f".{name}.partial")
        try:
            with open(os.open(partial, _NEW_FILE, 0o644), "w", encoding="utf-8") as file:
                file.write(document)
            os.replace(partial, self._path.with_name(name))
        except OSError as error:
            partial.unlink(missing_ok=True)
            self._give_up(error.strerror)

    def close(self) -> None:
        """Closes the file; what is emitted later is forgotten."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _give_up(self, reason: str | None) -> None:
        self.close()
        logger.warning("%s: %s; no more events are recorded", self._path, reason)


def _own_file(directory: Path) -> tuple[Path, int]:
    """Returns the file of this process in a folder, open: a new one at first, then the same."""
    key = (str(directory.resolve()), os.getpid())
    if (known := _own_files.get(key)) is not None:
        with contextlib.suppress(FileNotFoundError):
            return known, _open_for_appending(known)
    # Neither host nor process number are of one process alone where containers write.
    name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}.jsonl"
    path = _own_files[key] = directory / name
    return path, os.open(path, _NEW_FILE | os.O_APPEND, 0o644)


def _open_for_appending(path: Path) -> int:
    """Opens a file of whole lines; a line that a full disk cut short before is ended."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")
    return descriptor


def open_events(directory: str | None, logical_rank: int, generation: int) -> Events:
    """Returns the event log of this process, or one that forgets when there is no directory.

    Raises:
        UserError: the folder or the file can't be written.
    """
    if directory is None:
        return Events()
    return EventLog(directory, logical_rank, generation)


def kept_documents(directory: str | Path, kind: str) -> list[Path]:
    """Returns the files of the documents of a kind, in the order of their times."""
    return sorted(Path(directory).glob(f"[0-9]*{_ending(kind)}"))


def _ending(kind: str) -> str:
    return f".{kind}.json"


def read_events(directory: str | Path) -> list[EventRecord]:
    """Returns the events of all processes in the order of their times.

    Lines that a full disk or a power cut left incomplete are left out, and events that only newer
    builds know.

    Raises:
        ValueError: a whole line is no event; says which.
    """
    records = (record for read in histories_in(directory).values() for record in read())
    return sorted(records, key=lambda record: record.time)


def histories_in(directory: str | Path) -> dict[str, History]:
    """Returns what reads the events of each process, by the name of its file.

    A reader holds one line at a time; it leaves out and raises what `read_events` does.
    """
    paths = sorted(Path(directory).glob("*.jsonl"))
    return {str(path): functools.partial(_records, path) for path in paths}


def _records(path: Path) -> Iterator[EventRecord]:
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            except RecursionError as error:
                raise ValueError(f"{path}:{number} is no event: {line[:80]}") from error
            event = _event_of(record, f"{path}:{number}")
            if event is not None:
                yield event


def _event_of(record: Any, place: str) -> EventRecord | None:
    try:
        known = {name: record.pop(name) for name in _COMMON_FIELDS}
        known["time"] = float(known["time"])
        if known["event"] not in _EVENTS:
            return None
        known["event"] = EventName(known["event"])
    except (ValueError, KeyError, AttributeError, TypeError, OverflowError) as error:
        raise ValueError(f"{place} is no event: {str(record)[:80]}") from error
    return EventRecord(**known, fields=record)


def _plain(value: Any) -> Any:
    """Returns the value as JSON holds it: JSON has no infinities and no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return value
