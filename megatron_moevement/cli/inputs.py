# SPDX-License-Identifier: Apache-2.0
"""What several commands read: stores in host memory, events, and files of text."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron_moevement.errors import UserError
from megatron_moevement.runtime.observation.events import EventRecord, histories_in, select_events
from megatron_moevement.runtime.stores.store import default_store_dir
from megatron_moevement.training.arguments import Arguments, parse

DAMAGE = (ValueError, KeyError, TypeError, AttributeError, OverflowError)
"""What comes of an event that lacks a field, or has another value there than a job writes."""

EVENT_DIR = "the run's --moevement-event-dir, or the folder that has it as `events`"
"""What a command that reads events is given."""
_EVENTS = "events"
"""The folder of events in that of a run of `scripts/train_moe.sbatch`."""


def add_store_dir(parser: argparse.ArgumentParser) -> None:
    """Adds `--store-dir`."""
    parser.add_argument(
        "--store-dir",
        type=Path,
        default=default_store_dir(),
        metavar="DIR",
        help="the --moevement-store-dir of the run",
    )


def events_in(event_dir: str, wanted: Callable[[EventRecord], bool]) -> list[EventRecord]:
    """Returns some events of a run, in the order of time; the folder must be there."""
    return select_events(event_folder(event_dir), wanted)


@contextlib.contextmanager
def damage_refused(*event_dirs: str) -> Iterator[None]:
    """Makes one line of what an event is damaged in, where folders of events are read.

    Raises:
        UserError: an event lacks a field, or has another value there than a job writes.
    """
    try:
        yield
    except DAMAGE as error:
        raise UserError(f"{', '.join(event_dirs)}: an event is damaged: {error!r}") from error


def event_folder(event_dir: str) -> Path:
    """Returns the folder with the events of a run, from what a command was given.

    Raises:
        UserError: that is no folder.
    """
    given = Path(event_dir)
    if not given.is_dir():
        raise UserError(f"{event_dir} is no folder; give the run's --moevement-event-dir")
    below = given / _EVENTS
    has_them_below = below.is_dir() and not histories_in(given) and histories_in(below)
    return below if has_them_below else given


def read_text(path: Path) -> str:
    """Returns the text of a file that a user has named; one that can't be read is refused."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"can't read {path}: it is no UTF-8 text") from error


def check_flags(flags: Sequence[str], ranks: int) -> Arguments:
    """Returns what the flags of a job say, before its ranks are started: they are this command's.

    Raises:
        UserError: there are none, or the training program would refuse them.
    """
    if not flags:
        raise UserError("give the flags of the job, those of pretrain_moe.py, after --")
    return parse(flags, ranks)
