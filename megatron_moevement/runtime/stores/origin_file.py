# SPDX-License-Identifier: Apache-2.0
"""Beside the files of a process: that others have computed, otherwise, what its memory has."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

from megatron_moevement.policy.document import Document
from megatron_moevement.runtime.stores.record_file import read_record, write_record
from megatron_moevement.runtime.stores.store import ORIGIN_NAME, process_folders


@dataclasses.dataclass(frozen=True)
class Origin(Document):
    """What memory has that came from a tier of machines that compute otherwise.

    Attributes:
        step: with a window from it on, nothing of theirs is needed any more.
        lacking: the conditions of EXACT that do not hold for it, each in a few words.
    """

    step: int
    lacking: tuple[str, ...]


def write_origin(folder: Path, origin: Origin) -> None:
    """Writes it into the folder of a process, whole or not at all."""
    write_record(folder / ORIGIN_NAME, origin)


def read_origin(folder: Path) -> Origin | None:
    """Returns what the folder of a process has; None where nothing readable is there."""
    return read_record(folder / ORIGIN_NAME, Origin.of_document)


def lacking_in(run_folder: Path) -> tuple[str, ...]:
    """Returns what EXACT lacks for the memory that processes of a run left on this machine."""
    try:
        found = map(read_origin, process_folders(run_folder).values())
        return tuple(dict.fromkeys(reason for each in found if each for reason in each.lacking))
    except OSError:
        return ()


def forget_origin(folder: Path, start: int) -> None:
    """Removes it once a window of this process's own is persisted.

    Args:
        start: of the window.
    """
    origin = read_origin(folder)
    if origin is not None and start >= origin.step:
        with contextlib.suppress(FileNotFoundError):
            (folder / ORIGIN_NAME).unlink()
