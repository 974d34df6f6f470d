# SPDX-License-Identifier: Apache-2.0
"""The run that a store belongs to, in words: beside the files, for who wonders whose they are."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from megatron_moevement.errors import UserError
from megatron_moevement.runtime.slots.journal import stored_state
from megatron_moevement.runtime.slots.store_identity import RUN_NAME, RunIdentity
from megatron_moevement.runtime.stores.record_file import read_record, write_record
from megatron_moevement.runtime.stores.store import (
    JOURNAL_NAME,
    LOCK_NAME,
    folder_bytes,
    process_folders,
)
from megatron_moevement.runtime.stores.store_lock import lock_owner

_LIMITS = ("--moevement-min-window", "--moevement-max-window")
"""Of W, as the layout of a run has them."""


@dataclasses.dataclass(frozen=True)
class LeftRun:
    """A run that has a state in memory and no process on this machine.

    Attributes:
        identity: what it is; None where that was not written down.
    """

    run_id: str
    step: int
    size_bytes: int
    identity: RunIdentity | None


def write_run(folder: Path, identity: RunIdentity) -> None:
    """Writes into the folder of a process what its run is, whole or not at all."""
    write_record(folder / RUN_NAME, identity)


def read_run(folder: Path) -> RunIdentity | None:
    """Returns what the run of a process's folder is; None where nothing readable says so."""
    return read_record(folder / RUN_NAME, RunIdentity.out_of)


def check_layout(run_folders: list[Path], identity: RunIdentity) -> None:
    """Refuses to go on from memory of this run whose bytes mean something else.

    Args:
        run_folders: in which processes of the run left files, in memory or flushed.

    Raises:
        UserError: the memory was made with other flags.
    """
    for run_folder in run_folders:
        for folder in process_folders(run_folder).values():
            found = read_run(folder)
            if found is None or found.deciding != identity.deciding:
                continue
            others = {*found.layout.items()} - {*identity.layout.items()}
            if others and (folder / JOURNAL_NAME).exists():
                flags, needed = _as_flags(dict(others))
                raise UserError(
                    f"this run left its memory in {folder}, made with {flags}: launch with "
                    f"{needed} to go on from it, or remove {run_folder} to begin without it"
                )


def _as_flags(layout: Mapping[str, str]) -> tuple[str, str]:
    """Returns the flags of a launch with such a layout, and these with what it must lack.

    A W from which the limits follow is one flag, which a job has had that chose none.
    """
    rest = dict(layout)
    smallest, largest = (layout.get(name) for name in _LIMITS)
    is_fixed = smallest is not None and smallest == largest
    if is_fixed:
        rest = {name: value for name, value in layout.items() if name not in _LIMITS}
        rest["--moevement-window"] = str(largest)
    flags = " ".join(f"{name} {value}" for name, value in sorted(rest.items()))
    return flags, f"{flags} and without limits of W" if is_fixed else flags


def left_runs(root: Path, own_run_id: str) -> tuple[LeftRun, ...]:
    """Returns the other runs of this user that left a state in a store directory."""
    try:
        folders = sorted(root.iterdir())
    except OSError:
        return ()
    found = (_left_run(folder) for folder in folders if folder.name != own_run_id)
    return tuple(one for one in found if one is not None)


def _left_run(run_folder: Path) -> LeftRun | None:
    """Returns what a run left; None where a process of it lives, or nothing could be gone on from.

    What another process removes meanwhile counts as gone.
    """
    try:
        if run_folder.lstat().st_uid != os.geteuid():
            return None
        processes = process_folders(run_folder)
        if any(lock_owner(folder / LOCK_NAME) is not None for folder in processes.values()):
            return None
        steps = [step for one in processes.values() if (step := _committed(one)) is not None]
        size_bytes = sum(folder_bytes(folder) for folder in processes.values())
    except OSError:
        return None
    if not steps:
        return None
    runs = (read_run(folder) for folder in processes.values())
    identity = next((one for one in runs if one is not None), None)
    return LeftRun(run_folder.name, max(steps), size_bytes, identity)


def _committed(folder: Path) -> int | None:
    try:
        state = stored_state(folder / JOURNAL_NAME, None)
    except UserError:
        return None
    return None if state is None else state.committed
