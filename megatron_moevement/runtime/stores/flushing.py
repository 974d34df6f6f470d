# SPDX-License-Identifier: Apache-2.0
"""Flushing: what a job that stops for lack of processes writes beside its durable checkpoints.

`<save>/moevement/flushed/<run id>/process-<n>/` holds the files of a process's store as they were.
They go back into memory at the next launch, to whoever then has the rank (`adoption.py`).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from megatron_moevement.runtime.slots.mapped_file import CREATING_SUFFIX
from megatron_moevement.runtime.slots.store_identity import StoreIdentity
from megatron_moevement.runtime.stores.store import (
    JOURNAL_NAME,
    LOCK_NAME,
    StoreDirectory,
    process_folder,
)


def flushed_folder(save: Path, identity: StoreIdentity) -> Path:
    """Returns the folder of what processes of a run flushed."""
    return _root(save) / identity.run_id


def flush_store(store: StoreDirectory, save: Path) -> Path:
    """Copies a store to durable storage; the copy is whole from the moment it has its name.

    Args:
        store: of this process; nobody writes to it any more.

    Raises:
        OSError: the system refuses; a former copy may be gone.
    """
    target = process_folder(_root(save), store.identity.run_id, store.process)
    partial = target.with_name(f"{target.name}{CREATING_SUFFIX}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700, parents=True)
        for path in store.folder.iterdir():
            if path.name != LOCK_NAME:
                _copy(path, partial / path.name)
        _sync(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        _sync(target.parent)
    except BaseException:  # of Ctrl-C nothing is left, and a full disk is not kept full
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def bring_back(flushed: Path, folder: Path) -> None:
    """Copies a flushed store into a process's folder, the journal last: without it nothing counts.

    Raises:
        OSError: the file system is full.
    """
    names = sorted((path.name for path in flushed.iterdir()), key=lambda name: name == JOURNAL_NAME)
    for name in names:
        bring_back_file(flushed / name, folder)


def bring_back_file(file: Path, folder: Path) -> None:
    """Copies a file of a store into a process's folder, where it is whole or not there at all.

    Raises:
        OSError: the file system is full.
    """
    creating = folder / f"{file.name}{CREATING_SUFFIX}"
    _copy(file, creating)
    creating.rename(folder / file.name)


def remove_flushed(folder: Path) -> None:
    """Removes what processes of a run flushed; several may do it at once."""
    shutil.rmtree(folder, ignore_errors=True)


def _root(save: Path) -> Path:
    return save / "moevement" / "flushed"


def _copy(source: Path, target: Path) -> None:
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(source, os.O_RDONLY | flags), "rb") as reading:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags, 0o600)
        with open(descriptor, "wb") as writing:
            shutil.copyfileobj(reading, writing, 1 << 20)
            writing.flush()
            os.fsync(descriptor)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
