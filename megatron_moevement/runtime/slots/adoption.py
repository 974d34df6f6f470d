"""Adoption: a process goes on with the store that the last occupant of its rank left here.

A job whose processes were exchanged on the way is launched again with ranks in their first order.
What the newest occupant of a rank left on this machine then lies in another process's folder.
"""

from __future__ import annotations

import logging
import os

from megatron_moevement.errors import UserError
from megatron_moevement.policy.ranks import LogicalRank
from megatron_moevement.runtime.slots.identity import DamagedFileError
from megatron_moevement.runtime.slots.journal import Journal, JournalState
from megatron_moevement.runtime.slots.mapped_file import Access
from megatron_moevement.runtime.slots.store import (
    JOURNAL_NAME,
    LOCK_NAME,
    StoreDirectory,
    left_behind,
    process_folder,
)
from megatron_moevement.runtime.slots.store_lock import StoreLockedError

logger = logging.getLogger(__name__)


def adopt_store(own: StoreDirectory, rank: LogicalRank) -> int | None:
    """Takes over the store of the newest occupant of a rank, where it is newer than the own one.

    Its files are moved, not copied; each slot in them counts by its checksum only.

    Args:
        own: the store of this process, in which nothing is open.
        rank: the rank that this process occupies.

    Returns:
        The process whose store it was; None when the own one stays.
    """
    mine = _state(own, own.process)
    newest, adopted = _age(mine, rank), None
    for process in left_behind(own.root, own.identity.run_id):
        age = _age(_state(own, process), rank)
        if age > newest:
            newest, adopted = age, process
    if adopted is None:
        return None
    try:
        left = StoreDirectory(own.root, own.identity, adopted)
    except StoreLockedError:
        return None
    own.clear()
    for path in left.folder.iterdir():
        if path.name != LOCK_NAME:
            os.rename(path, own.folder / path.name)
    left.remove()
    logger.info("process %d goes on with what process %d left", own.process, adopted)
    return adopted


def _state(own: StoreDirectory, process: int) -> JournalState | None:
    """Returns what a process's journal says; None when there is none of this run."""
    path = process_folder(own.root, own.identity.run_id, process) / JOURNAL_NAME
    try:
        journal = Journal.open(path, own.identity, Access.READ)
    except (FileNotFoundError, DamagedFileError, UserError):
        return None
    state = journal.state
    journal.close()
    return state


def _age(state: JournalState | None, rank: LogicalRank) -> tuple[int, int]:
    """Returns what is greater the newer a rank's state is; nothing of another rank is newer."""
    if state is None or state.rank != rank:
        return (-1, -1)
    return (state.era, state.committed)
