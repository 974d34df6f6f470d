# SPDX-License-Identifier: Apache-2.0
"""Events of one process as JSON lines: what happened, when, and what it cost.

Whole lines are appended, so records of several threads don't mix. What is written survives the
death of the process: faults, recoveries and ends are, when they are emitted, as long as the folder
answers. Standard library only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from megatron_moevement.errors import UserError
from megatron_moevement.policy.accounting.event import (
    DURABLE,
    PERIODIC,
    SHARED,
    EventName,
    EventRecord,
    History,
)
from megatron_moevement.policy.accounting.steps import joined
from megatron_moevement.runtime.closing import Closing
from megatron_moevement.runtime.observation.event_file import (
    NEW_FILE,
    PATIENCE_S,
    EventFile,
    files_in,
    parts_of,
    waits_for,
)
from megatron_moevement.runtime.patience import attempt
from megatron_moevement.runtime.security.ownership import trusted_owners

logger = logging.getLogger(__name__)

__all__ = [
    "EventLog",
    "EventName",
    "EventRecord",
    "Events",
    "Recording",
    "event_of_line",
    "histories_in",
    "kept_documents",
    "open_events",
    "read_events",
    "select_events",
    "steps_of_another",
]

_EVENTS = frozenset(name.value for name in EventName)
_STEPS_OF_ANOTHER = re.compile(
    rb'\{"time": [^,]+, ("logical_rank": [1-9]\d*, "pid": \d+, "generation": \d+), '
    rb'"iteration": \d+, "event": "iteration"'
)
_COMMON_FIELDS = [f.name for f in dataclasses.fields(EventRecord) if f.name != "fields"]


class Events(Closing):
    """Takes events and forgets them; any thread may emit."""

    def emit(self, event: EventName, iteration: int, **fields: Any) -> None:
        """Records that something happened; fields hold what JSON can hold."""

    def keep(self, kind: str, document: str) -> None:
        """Writes a document beside the events: all of it, or nothing."""

    @property
    def is_open(self) -> bool:
        """Whether events are written."""
        return False

    def close(self) -> None:
        """Ends the recording."""


@dataclasses.dataclass(frozen=True)
class Recording:
    """How much is recorded.

    Attributes:
        interval: steps that one event of iterations stands for.
        most_bytes: of the files of one process; what the account needs may exceed it.
    """

    interval: int = 1
    most_bytes: int = 1 << 26


class EventLog(Events):
    """Writes the events of this process, in one generation, to its file.

    A thread beside training writes them; faults, recoveries and ends, with all before them, before
    `emit` returns. A disk that fails later ends the recording with one line on standard error:
    training goes on.

    Raises:
        UserError: the folder or the file can't be written.
    """

    def __init__(
        self,
        directory: str | Path,
        logical_rank: int,
        generation: int,
        recording: Recording | None = None,
    ) -> None:
        """Opens the file; nothing interrupts it.

        Args:
            directory: of the events of all processes.
            recording: None: each event is written before `emit` returns.
        """
        self._place = {
            "logical_rank": logical_rank,
            "pid": os.getpid(),
            "generation": generation,
        }
        self._interval = 1 if recording is None else recording.interval
        most_bytes = (recording or Recording()).most_bytes
        self._steps: tuple[int, int, Mapping[str, Any]] | None = None
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            if Path(directory).stat().st_uid not in trusted_owners():
                raise UserError(
                    f"--moevement-event-dir {directory} is another user's; give another one"
                )
            self._file = EventFile(Path(directory), most_bytes, _records)
        except OSError as error:
            raise UserError(
                f"--moevement-event-dir {directory}: {error.strerror}; give a writable folder"
            ) from error
        if recording is not None:
            self._file.start()

    def emit(self, event: EventName, iteration: int, **fields: Any) -> None:
        """Writes one record, or adds a step to those that one record stands for."""
        if not self._file.is_open or (event in SHARED and self._place["logical_rank"] > 0):
            return
        if event is EventName.ITERATION:
            self._add(iteration, fields)
        elif event in PERIODIC and self._file.is_behind:
            self._file.leave_out()
        else:
            if event not in PERIODIC:
                self._end_steps(threading.get_ident())
            write = self._file.write if event in DURABLE else self._file.write_later
            write(self._line(event, iteration, fields))

    def keep(self, kind: str, document: str) -> None:
        """Writes a document to a new file, whose name begins with the time and ends with `kind`."""
        if not self._file.is_open:
            return
        path = self._file.path.with_name(f"{time.time_ns()}-{self._place['pid']}{_ending(kind)}")
        refusal, silence = attempt(lambda: _write_whole(path, document), PATIENCE_S)
        if refusal is not None:
            self._file.give_up(refusal)
        if silence is not None:
            logger.warning("%s: %s; it may be missing", path, silence)

    @property
    def is_open(self) -> bool:
        """Whether events are written: not after the end, nor after a disk has failed."""
        return self._file.is_open

    def close(self) -> None:
        """Writes what waits and closes the file; what is emitted later is forgotten."""
        self._end_steps()
        self._file.close()

    def _add(self, iteration: int, fields: Mapping[str, Any]) -> None:
        """Adds a step; the thread that trains calls it.

        A restart may interrupt it anywhere: a step that was written before it was forgotten is
        written again, with the same times.
        """
        waiting = self._steps
        both = fields if waiting is None else joined(waiting[2], fields)
        self._steps = (threading.get_ident(), iteration, both)
        if iteration % self._interval == 0 and not self._file.is_behind:
            self._end_steps()

    def _end_steps(self, thread: int | None = None) -> None:
        """Writes the steps that were added, unless another thread than this one adds them."""
        waiting = self._steps
        if waiting is None or thread not in {None, waiting[0]}:
            return
        self._file.write_later(self._line(EventName.ITERATION, *waiting[1:]))
        self._steps = None

    def _line(self, event: EventName, iteration: int, fields: Mapping[str, Any]) -> bytes:
        record = {
            "time": time.time(),
            **self._place,
            "iteration": iteration,
            "event": event.value,
            **{name: _plain(value) for name, value in fields.items()},
        }
        return json.dumps(record, allow_nan=False).encode() + b"\n"


def _write_whole(path: Path, document: str) -> str | None:
    """Writes a new file, or nothing; returns why it can't be written."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(os.open(partial, NEW_FILE, 0o644), "w", encoding="utf-8") as file:
            file.write(document)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        return error.strerror or str(error)
    return None


def open_events(
    directory: str | None,
    logical_rank: int,
    generation: int,
    recording: Recording | None = None,
) -> Events:
    """Returns the event log of this process, or one that forgets when there is no directory.

    So it does while the events of a generation before still wait for the directory.

    Raises:
        UserError: the folder or the file can't be written.
    """
    if directory is None or waits_for(directory):
        return Events()
    return EventLog(directory, logical_rank, generation, recording)


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
    return select_events(directory, lambda _: True)


def select_events(
    directory: str | Path, wanted: Callable[[EventRecord], bool]
) -> list[EventRecord]:
    """Returns the events that are wanted, as `read_events` does; the others are not held."""
    records = (record for read in histories_in(directory).values() for record in read())
    return sorted(filter(wanted, records), key=lambda record: record.time)


def histories_in(directory: str | Path) -> dict[str, History]:
    """Returns what reads the events of each process, by the name of its file.

    A reader holds one line at a time; it leaves out and raises what `read_events` does.
    """
    return {str(path): functools.partial(_history, path) for path in files_in(Path(directory))}


def _history(path: Path) -> Iterator[EventRecord]:
    """Yields the events of a process; a file that its writer puts aside meanwhile is left out."""
    for one in (*(part.path for part in parts_of(path)), path):
        with contextlib.suppress(FileNotFoundError):
            yield from _records(one)


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


def event_of_line(line: bytes) -> EventRecord | None:
    """Returns the event of a line; None where it is none that this build has."""
    try:
        return _event_of(json.loads(line), "a line")
    except (ValueError, RecursionError):
        return None


def steps_of_another(line: bytes) -> bytes | None:
    """Returns whose steps a line has, and of which generation; None where it has none.

    Nor does it of rank 0, whose steps are those of the job. It is quicker than to read the event.
    """
    match = _STEPS_OF_ANOTHER.match(line)
    return None if match is None else match[1]


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
