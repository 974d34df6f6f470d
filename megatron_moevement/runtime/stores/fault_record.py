# SPDX-License-Identifier: Apache-2.0
"""What of faults on purpose outlives a process: when the job began, and what struck already.

A file for each rank in `<store dir>/<run id>/faults/`, one JSON object per line. A relaunch finds
it as it finds snapshots; it goes when they go.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from pathlib import Path
from typing import Any

from megatron_moevement.errors import UserError
from megatron_moevement.runtime.stores.store import make_folders

FOLDER_NAME = "faults"
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclasses.dataclass(frozen=True)
class KnownFaults:
    """What the files on this machine say.

    Attributes:
        began_s: when the job began, in seconds since the epoch; None before its first launch.
    """

    began_s: float | None
    struck: frozenset[str]


class FaultRecord:
    """The record of one rank; one thread opens, removes and closes it, any thread notes."""

    def __init__(self, root: Path, run_id: str, rank: int) -> None:
        """Makes it where it is missing.

        Raises:
            UserError: it can't be made, or the folder is another user's.
        """
        self.folder = root / run_id / FOLDER_NAME
        self._path = self.folder / f"rank-{rank}"
        try:
            make_folders(root, self.folder.parent, self.folder)
            self._descriptor = os.open(self._path, _FLAGS, 0o600)
        except OSError as error:
            raise UserError(
                f"can't make {self._path}: {error.strerror or error}; give another "
                "--moevement-store-dir"
            ) from error
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def read(self) -> KnownFaults:
        """Returns what all ranks' files on this machine say."""
        began: list[float] = []
        struck: list[str] = []
        for path in sorted(self.folder.glob("rank-*")):
            for line in path.read_bytes().splitlines():
                with contextlib.suppress(ValueError, RecursionError):  # a cut line is none
                    document = json.loads(line)
                    found = document if isinstance(document, dict) else {}
                    began += [one for one in [found.get("began_s")] if isinstance(one, float)]
                    struck += [one for one in [found.get("struck")] if isinstance(one, str)]
        return KnownFaults(min(began, default=None), frozenset(struck))

    def begin(self, began_s: float) -> None:
        """Keeps when the job began."""
        self._append({"began_s": began_s})

    def note(self, fault: str) -> None:
        """Keeps that a fault strikes; it is kept when this returns, whatever happens then."""
        self._append({"struck": fault})

    def close(self) -> None:
        """Lets go of the file."""
        os.close(self._descriptor)

    def _append(self, document: dict[str, Any]) -> None:
        os.write(self._descriptor, json.dumps(document).encode() + b"\n")


def forget_rank(root: Path, run_id: str, rank: int) -> None:
    """Removes the record of a rank if there is one, and the folders with the last of the run's."""
    folder = root / run_id / FOLDER_NAME
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        (folder / f"rank-{rank}").unlink()
        _remove_empty(folder)


def remove_record(run_folder: Path) -> Path | None:
    """Removes the record of a run that no live process uses; returns its folder if it is gone."""
    folder = run_folder / FOLDER_NAME
    try:
        for path in folder.iterdir():
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
    except (BlockingIOError, FileNotFoundError):  # in use, or there is none
        return None
    _remove_empty(folder)
    return folder


def _remove_empty(folder: Path) -> None:
    for one in (folder, folder.parent):
        with contextlib.suppress(OSError):  # there is more in it
            one.rmdir()
