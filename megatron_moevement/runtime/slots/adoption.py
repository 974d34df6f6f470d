"""Adoption: a process goes on with the store that the last occupant of its rank left here.

A job whose processes were exchanged on the way is launched again with ranks in their first order.
What the newest occupant of a rank left on this machine then lies in another process's folder, or
among what the processes flushed to durable storage when they stopped.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from megatron_moevement.errors import UserError
from megatron_moevement.policy.ranks import LogicalRank
from megatron_moevement.runtime.slots.flushing import bring_back
from megatron_moevement.runtime.slots.identity import DamagedFileError
from megatron_moevement.runtime.slots.journal import Journal, JournalState
from megatron_moevement.runtime.slots.mapped_file import Access
from megatron_moevement.runtime.slots.store import (
    JOURNAL_NAME,
    LOCK_NAME,
    StoreDirectory,
    left_behind,
    process_folder,
    process_folders,
)
from megatron_moevement.runtime.slots.store_lock import StoreLockedError

logger = logging.getLogger(__name__)


def adopt_store(own: StoreDirectory, rank: LogicalRank, flushed: Iterable[Path] = ()) -> int | None:
    """Takes over the store of the newest occupant of a rank, where it is newer than the own one.

    Its files are moved, not copied, but for those of a flushed store; each slot in them counts by
    its checksum only.

    Args:
        own: the store of this process, in which nothing is open.
        rank: the rank that this process occupies.
        flushed: folders of what processes of the run flushed.

    Returns:
        The process whose store it was; None when the own one stays.

    Raises:
        UserError: there is no room for a flushed store, or it is another job's, as the own one may
            be: nothing of it may be lost by a flag that was forgotten.
    """
    mine = _state(own, own.folder)
    newest, adopted = _age(mine, rank), None
    for process in left_behind(own.root, own.identity.run_id):
        left_folder = process_folder(own.root, own.identity.run_id, process)
        with contextlib.suppress(UserError):  # another job's is no business of ours
            age = _age(_state(own, left_folder), rank)
            if age > newest:
                newest, adopted = age, process
    durable = None
    for process, folder in (one for each in flushed for one in process_folders(each).items()):
        age = _age(_flushed_state(own, folder), rank)
        if age > newest:
            newest, adopted, durable = age, process, folder
    if adopted is None:
        return None
    if durable is not None:
        return _bring_back(own, durable, adopted)
    try:
        with StoreDirectory(own.root, own.identity, adopted) as left:
            own.clear()
            for path in left.folder.iterdir():
                if path.name != LOCK_NAME:
                    os.rename(path, own.folder / path.name)
            left.remove()
    except StoreLockedError:
        return None
    logger.info("process %d goes on with what process %d left", own.process, adopted)
    return adopted


def _bring_back(own: StoreDirectory, flushed: Path, process: int) -> int:
    own.clear()
    try:
        bring_back(flushed, own.folder)
    except OSError as error:
        raise UserError(
            f"can't bring {flushed} back into {own.folder}: {error.strerror or error}; free memory "
            "there, or give another --moevement-store-dir"
        ) from error
    logger.info("process %d goes on with what process %d flushed", own.process, process)
    return process


def _flushed_state(own: StoreDirectory, folder: Path) -> JournalState | None:
    try:
        return _state(own, folder)
    except UserError as error:
        raise UserError(
            f"{folder} was flushed by a job of other flags: go on with those, give another "
            "--moevement-run-id, or remove that folder"
        ) from error


def _state(own: StoreDirectory, folder: Path) -> JournalState | None:
    """Returns what the journal in a folder says; None when there is none.

    Raises:
        UserError: it is another job's.
    """
    try:
        journal = Journal.open(folder / JOURNAL_NAME, own.identity, Access.READ)
    except (FileNotFoundError, DamagedFileError):
        return None
    state = journal.state
    journal.close()
    return state


def _age(state: JournalState | None, rank: LogicalRank) -> tuple[int, int]:
    """Returns what is greater the newer a rank's state is; nothing of another rank is newer."""
    if state is None or state.rank != rank:
        return (-1, -1)
    return (state.era, state.committed)
