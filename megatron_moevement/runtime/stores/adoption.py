# SPDX-License-Identifier: Apache-2.0
"""Adoption: a process goes on with the store that the last occupant of its rank left here.

A job whose processes were exchanged on the way is launched again with ranks in their first order,
and a process takes the place of one that died on the same machine. What the newest occupant of a
rank left here then lies in another process's folder, or among what the processes flushed to durable
storage when they stopped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

from megatron_moevement.errors import UserError
from megatron_moevement.policy.copies.left_stores import (
    NOTHING,
    age_of,
    is_newer,
    is_outdated,
    newest_first,
    share_of_flushed,
)
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.runtime.slots.journal import JournalState, stored_state
from megatron_moevement.runtime.stores.flushing import bring_back, bring_back_file
from megatron_moevement.runtime.stores.store import (
    JOURNAL_NAME,
    StoreDirectory,
    left_behind,
    process_folder,
    process_folders,
    stored_rings,
)
from megatron_moevement.runtime.stores.store_lock import StoreLockedError

logger = logging.getLogger(__name__)

_POLL_S = 0.05


def adopt_store(
    own: StoreDirectory,
    rank: LogicalRank,
    flushed: Iterable[Path] = (),
    patience: timedelta = timedelta(0),
) -> int | None:
    """Takes over the store of the newest occupant of a rank, where the own one is not newer.

    Its files are moved, not copied, but for those of a flushed store; each slot in them counts by
    its checksum only. What the own store holds of another rank stays: somebody needs it. A process
    that dies on the way leaves two stores, which are taken over together.

    Args:
        own: the store of this process, in which nothing is open.
        patience: how long to wait for a process that dies and still has its store locked.

    Returns:
        The process whose store it was; None when the own one stays.

    Raises:
        UserError: there is no room for a flushed store, or it is another job's, as the own one may
            be: nothing of it may be lost by a flag that was forgotten.
    """
    state = _state(own, own.folder)
    mine, rollbacks = age_of(state, rank), 0 if state is None else state.rollbacks
    _await_the_dying(own, rank, patience)
    left = {
        process: _age_left(
            own, process_folder(own.root, own.identity.run_id, process), rank, rollbacks
        )
        for process in left_behind(own.root, own.identity.run_id)
    }
    newest, durable, adopted = max([mine, *left.values()]), None, None
    spare = _state(own, own.folder)
    if spare is not None and spare.rank is None:
        flushed = ()  # what it holds came from ranks that had brought that back
    for process, folder in (one for each in flushed for one in process_folders(each).items()):
        age = age_of(_flushed_state(own, folder), rank, rollbacks=rollbacks)
        if age > newest:
            newest, durable, adopted = age, folder, process
    if durable is not None and adopted is not None:
        _make_room(own, rank)
        return _bring_back(own, durable, adopted)
    is_older = newest > mine
    for process, age in left.items():
        if age == newest != NOTHING and _move(own, process, rank, is_older=is_older):
            adopted, is_older = process, False
    return adopted


def take_in_left(own: StoreDirectory, *, replaces: bool = True) -> tuple[int, ...]:
    """Moves here what others left on this machine and nobody has adopted, whichever rank's it is.

    Where a launch exchanges ranks between machines, the slots of a rank lie with a process of
    another one, which serves them. Several processes share what there is; each store goes to the
    one that locks it first. The newest store comes first, and takes the place of the own one
    where the rings that both have end, here, before the window that it says is persisted.

    Args:
        replaces: whether the own files may be replaced: not where something refers to their memory.

    Returns:
        The processes whose slots are here now.
    """
    own.read_again()
    taken = []
    found = _states_left(own)
    for process in newest_first(found):
        with contextlib.suppress(UserError):  # another user's
            left, mine = found[process], _state(own, own.folder)
            newer = left if mine is None or (replaces and is_newer(left, mine)) else None
            has_state = mine is not None
            if _is_of_use(left, mine) and _take_in(own, process, newer, has_state=has_state):
                taken.append(process)
    return tuple(taken)


def remove_outdated(own: StoreDirectory) -> None:
    """Removes what others left on this machine from before the window that is persisted.

    Args:
        own: the store of this process, whose journal says which window that is.
    """
    known = _state(own, own.folder)
    if known is None:
        return
    for process, left in _states_left(own).items():
        version = left.timetable.newest.schedule_version
        if not is_outdated(left.rollbacks, version, left.committed, known):
            continue
        # Another process may remove it just now; and what can't be removed is in nobody's way.
        with (
            contextlib.suppress(UserError),
            StoreDirectory(own.root, own.identity, process) as store,
        ):
            store.remove()


def _states_left(own: StoreDirectory) -> dict[int, JournalState]:
    found = {}
    for process in left_behind(own.root, own.identity.run_id):
        with contextlib.suppress(UserError):  # another job's
            state = _state(own, process_folder(own.root, own.identity.run_id, process))
            if state is not None:
                found[process] = state
    return found


def take_in_flushed(
    own: StoreDirectory, flushed: Iterable[Path], rank: LogicalRank, ranks: Sequence[LogicalRank]
) -> tuple[int, ...]:
    """Copies here what is lacking of this rank's share of the flushed stores.

    Args:
        flushed: folders of what processes of the run flushed, which all ranks see alike.

    Returns:
        The processes whose slots are here now.

    Raises:
        UserError: there is no room for them.
    """
    own.read_again()
    taken = []
    for each in flushed:
        folders = process_folders(each)
        found = {process: _flushed_state(own, folder) for process, folder in folders.items()}
        states = {process: state for process, state in found.items() if state is not None}
        named = {process: state.rank for process, state in states.items()}
        for process in share_of_flushed(named, rank, ranks):
            mine = _state(own, own.folder)
            is_of_use = _is_of_use(states[process], mine)
            has_state = mine is not None
            if is_of_use and _bring_back_rings(own, folders[process], has_state=has_state):
                taken.append(process)
    return tuple(taken)


def _is_of_use(left: JournalState | None, mine: JournalState | None) -> bool:
    """Returns whether what a journal stands for could be needed: it is of no older history."""
    return left is not None and (mine is None or left.rollbacks >= mine.rollbacks)


def _bring_back_rings(own: StoreDirectory, flushed: Path, *, has_state: bool) -> bool:
    """Copies the rings that the own store lacks, then the journal if it lacks that, too."""
    lacking = _lacking(own, flushed)
    names = [path.name for path in lacking] + ([] if has_state else [JOURNAL_NAME])
    try:
        for name in names:
            bring_back_file(flushed / name, own.folder)
    except OSError as error:
        raise _no_room(own, flushed, error) from error
    return bool(lacking)


def _lacking(own: StoreDirectory, folder: Path) -> list[Path]:
    return [
        stored.path
        for stored in stored_rings(folder)
        if not (own.folder / stored.path.name).exists()
    ]


def _take_in(
    own: StoreDirectory, process: int, newer: JournalState | None, *, has_state: bool
) -> bool:
    """Moves what the own store lacks; of a newer one everything, where that may be replaced."""
    try:
        with StoreDirectory(own.root, own.identity, process) as left:
            replaced = left.rings() if newer and _may_replace(own, left, newer) else None
            if not has_state or replaced is not None:
                bring_back_file(left.folder / JOURNAL_NAME, own.folder)
            for stored in replaced or ():
                own.drop_ring(stored.role, stored.owner)
            lacking = _lacking(own, left.folder)
            for path in lacking:
                os.replace(path, own.folder / path.name)
            if not left.rings():
                left.remove()
    except (StoreLockedError, FileNotFoundError):
        return False
    return bool(lacking)


def _may_replace(own: StoreDirectory, left: StoreDirectory, newer: JournalState) -> bool:
    """Returns whether own rings end before the window that a newer store with the same persisted.

    Else its journal stays where the slots are that it tells of.
    """
    rings = (own.open_ring(stored.role, stored.owner) for stored in left.rings())
    return all(
        is_outdated(record.rollbacks, record.window.schedule_version, record.step, newer)
        for ring in rings
        for record in (() if ring is None else ring.records())
    )


def _move(own: StoreDirectory, process: int, rank: LogicalRank, *, is_older: bool) -> bool:
    """Moves what a dead process left, and the own store lacks; returns whether there was anything.

    The journal is copied: until the last ring is here, either store is found by its own.
    """
    lacking = []
    try:
        with StoreDirectory(own.root, own.identity, process) as left:
            stays = _is_for_others(own, left.folder)
            if is_older:
                if not stays:
                    _make_room(own, rank)
                if _is_newer(own, left.folder):
                    bring_back_file(left.folder / JOURNAL_NAME, own.folder)
            lacking = [
                stored.path
                for stored in left.rings()
                if (is_older and not stays) or not (own.folder / stored.path.name).exists()
            ]
            for path in lacking:
                os.replace(path, own.folder / path.name)
            if not left.rings():
                left.remove()
    except (StoreLockedError, FileNotFoundError):  # whoever gives the run up removes its files
        return False
    if is_older or lacking:
        logger.info("process %d goes on with what process %d left", own.process, process)
    return is_older or bool(lacking)


def _make_room(own: StoreDirectory, rank: LogicalRank) -> None:
    """Removes what is older of the same rank, or of none, from the own store."""
    state = _state(own, own.folder)
    if state is None or state.rank in {None, rank}:
        own.clear()


def _is_for_others(own: StoreDirectory, folder: Path) -> bool:
    """Returns whether the own store is that of a spare, with copies that count beside a left one.

    A dead process may have been writing one of its copies; those of the spare are whole.
    """
    mine, left = _state(own, own.folder), _state(own, folder)
    if mine is None or mine.rank is not None:
        return False
    return left is None or mine.rollbacks >= left.rollbacks


def _is_newer(own: StoreDirectory, folder: Path) -> bool:
    """Returns whether the state in a folder is as new as the own one, whichever rank's."""
    mine, other = _state(own, own.folder), _state(own, folder)
    if mine is None or other is None:
        return mine is None
    return (other.rollbacks, other.committed) >= (mine.rollbacks, mine.committed)


def _await_the_dying(own: StoreDirectory, rank: LogicalRank, patience: timedelta) -> None:
    """Waits until the system has taken the former occupant of a rank apart, which frees its lock.

    Who only hangs keeps its lock, and its store is not waited for any longer.
    """
    deadline_s = time.monotonic() + patience.total_seconds()
    while time.monotonic() < deadline_s and any(
        _age_left(own, folder, rank) != NOTHING for folder in _locked_by_others(own)
    ):
        time.sleep(_POLL_S)


def _locked_by_others(own: StoreDirectory) -> Iterator[Path]:
    free = left_behind(own.root, own.identity.run_id)
    for process, folder in process_folders(own.folder.parent).items():
        if process not in free and process != own.process:
            yield folder


def _bring_back(own: StoreDirectory, flushed: Path, process: int) -> int:
    try:
        bring_back(flushed, own.folder)
    except OSError as error:
        raise _no_room(own, flushed, error) from error
    logger.info("process %d goes on with what process %d flushed", own.process, process)
    return process


def _no_room(own: StoreDirectory, flushed: Path, error: OSError) -> UserError:
    return UserError(
        f"can't bring {flushed} back into {own.folder}: {error.strerror or error}; free memory "
        "there, or give another --moevement-store-dir"
    )


def _flushed_state(own: StoreDirectory, folder: Path) -> JournalState | None:
    try:
        return _state(own, folder)
    except UserError as error:
        raise UserError(
            f"{folder} was flushed by a job of other flags: go on with those, give another "
            "--moevement-run-id, or remove that folder"
        ) from error


def _state(own: StoreDirectory, folder: Path) -> JournalState | None:
    return stored_state(folder / JOURNAL_NAME, own.identity)


def _age_left(
    own: StoreDirectory, folder: Path, rank: LogicalRank, rollbacks: int = 0
) -> tuple[int, int]:
    """Returns the age of what another process left; another job's is no business of ours."""
    with contextlib.suppress(UserError):
        return age_of(_state(own, folder), rank, rollbacks=rollbacks)
    return NOTHING
