# SPDX-License-Identifier: Apache-2.0
"""Removing the stores of runs of which no process lives."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

from megatron_moevement.errors import UserError
from megatron_moevement.runtime.stores.fault_record import FOLDER_NAME, remove_record
from megatron_moevement.runtime.stores.store import (
    LOCK_NAME,
    folder_bytes,
    process_folders,
    remove_folder,
)
from megatron_moevement.runtime.stores.store_listing import run_folders
from megatron_moevement.runtime.stores.store_lock import StoreLock, StoreLockedError, lock_owner


@dataclasses.dataclass(frozen=True)
class Cleaning:
    """What became of the stores.

    Attributes:
        removed: the folders that are gone, or would be, and the bytes of each.
    """

    removed: dict[Path, int]
    in_use: tuple[str, ...]


def clean(store_dir: Path, run_id: str | None, *, dry_run: bool = False) -> Cleaning:
    """Removes the stores of one run, or of all, of which no process lives on this machine.

    Args:
        run_id: of which run; None: of all.
        dry_run: remove nothing, and return what would be removed.

    Raises:
        UserError: the folder can't be read, or a store can't be removed.
    """
    removed: dict[Path, int] = {}
    in_use: list[str] = []
    for run in run_folders(store_dir):
        if run_id in {None, run.name}:
            removed |= _would_clean(run, in_use) if dry_run else _clean_run(run, in_use)
    for run in _runs_with_records(store_dir):
        if run_id in {None, run.name} and not process_folders(run):
            record = run / FOLDER_NAME if dry_run else remove_record(run)
            if record is not None:
                removed.setdefault(record, 0)
    return Cleaning(removed, tuple(in_use))


def _clean_run(run: Path, in_use: list[str]) -> dict[Path, int]:
    """Removes all stores of a run or none: while one process lives it may need those of the dead.

    Returns:
        What is gone, and the bytes of each; nothing where `in_use` got the reason.
    """
    removed: dict[Path, int] = {}
    with contextlib.ExitStack() as locks:
        for folder in process_folders(run).values():
            try:
                locks.enter_context(StoreLock(folder / LOCK_NAME))
                removed[folder] = folder_bytes(folder)
            except StoreLockedError as error:
                in_use.append(_stays(run, str(error)))
                return {}
            except FileNotFoundError:
                continue  # its process has just removed it
            except OSError as error:
                raise UserError(f"can't remove {folder}: {error.strerror or error}") from error
        for folder in removed:
            try:
                remove_folder(folder)
            except OSError as error:
                raise UserError(f"can't remove {folder}: {error.strerror or error}") from error
    return removed


def _would_clean(run: Path, in_use: list[str]) -> dict[Path, int]:
    """Returns what `_clean_run` would, without taking a lock that a launch may want now."""
    found: dict[Path, int] = {}
    for folder in process_folders(run).values():
        with contextlib.suppress(FileNotFoundError):
            owner = lock_owner(folder / LOCK_NAME)
            if owner is not None:
                in_use.append(_stays(run, str(StoreLockedError(folder / LOCK_NAME, owner))))
                return {}
            found[folder] = folder_bytes(folder)
    return found


def _stays(run: Path, reason: str) -> str:
    return f"run {run.name} stays as it is: {reason}"


def _runs_with_records(store_dir: Path) -> list[Path]:
    return sorted(record.parent for record in store_dir.glob(f"*/{FOLDER_NAME}") if record.is_dir())
