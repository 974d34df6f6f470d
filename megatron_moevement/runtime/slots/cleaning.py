"""Removing the stores that no live process uses."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_moevement.errors import UserError
from megatron_moevement.runtime.fault_record import remove_record
from megatron_moevement.runtime.slots.store import (
    LOCK_NAME,
    folder_bytes,
    process_folders,
    remove_folder,
)
from megatron_moevement.runtime.slots.store_lock import StoreLock, StoreLockedError
from megatron_moevement.runtime.slots.survey import run_folders


@dataclasses.dataclass(frozen=True)
class Cleaning:
    """What became of the stores.

    Attributes:
        removed: the folders that are gone, and the bytes that each has freed.
        in_use: why others are still there.
    """

    removed: dict[Path, int]
    in_use: tuple[str, ...]


def clean(store_dir: Path, run_id: str | None) -> Cleaning:
    """Removes the stores of one run, or of all, that no live process has locked.

    Raises:
        UserError: the folder can't be read, or a store can't be removed.
    """
    removed: dict[Path, int] = {}
    in_use = []
    for run in run_folders(store_dir):
        if run_id is not None and run.name != run_id:
            continue
        for folder in process_folders(run).values():
            try:
                with StoreLock(folder / LOCK_NAME):
                    freed_bytes = folder_bytes(folder)
                    remove_folder(folder)
                    removed[folder] = freed_bytes
            except StoreLockedError as error:
                in_use.append(str(error))
            except FileNotFoundError:
                continue  # its process has just removed it
            except OSError as error:
                raise UserError(f"can't remove {folder}: {error.strerror or error}") from error
    for run in _runs_with_records(store_dir):
        if run_id in {None, run.name} and not process_folders(run):
            record = remove_record(run)
            if record is not None:
                removed.setdefault(record, 0)
    return Cleaning(removed, tuple(in_use))


def _runs_with_records(store_dir: Path) -> list[Path]:
    return sorted(record.parent for record in store_dir.glob("*/faults") if record.is_dir())
