# SPDX-License-Identifier: Apache-2.0
"""The folder of one process's files: `<store dir>/<run id>/process-<n>/`."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

from megatron_moevement.errors import UserError
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.runtime.closing import Closing
from megatron_moevement.runtime.security.ownership import check_folder
from megatron_moevement.runtime.slots.journal import Journal, JournalShape, JournalState
from megatron_moevement.runtime.slots.mapped_file import CREATING_SUFFIX, free_bytes, out_of_space
from megatron_moevement.runtime.slots.nameless_file import NamelessFile
from megatron_moevement.runtime.slots.ring_file import RingFile, RingShape
from megatron_moevement.runtime.slots.store_identity import (
    RUN_NAME,
    DamagedFileError,
    StoreIdentity,
)
from megatron_moevement.runtime.stores.status_file import STATUS_NAME
from megatron_moevement.runtime.stores.store_lock import StoreLock, lock_owner

logger = logging.getLogger(__name__)

LOCK_NAME = "lock"
ORIGIN_NAME = "origin.json"
JOURNAL_NAME = "journal"
_FOLDER = re.compile(r"process-(\d+)")
_RING = re.compile(r"(own|held)-(pp\d+\.dp\d+\.tp\d+\.cp\d+\.ep\d+)\.ring")


class RingRole(Enum):
    """Whose slots a ring of a process keeps."""

    OWN = "own"
    HELD = "held"


@dataclasses.dataclass(frozen=True, order=True)
class StoredRing:
    """A ring that lies in a process's folder, by its name."""

    path: Path
    role: RingRole = dataclasses.field(compare=False)
    owner: LogicalRank = dataclasses.field(compare=False)


def default_store_dir() -> Path:
    """Returns where stores are unless told otherwise: in shared memory, a folder for each user."""
    return Path(f"/dev/shm/moevement-{os.geteuid()}")  # noqa: S108  (made with mode 0700, checked)


def process_folder(root: Path, run_id: str, process: int) -> Path:
    """Returns the folder of a process."""
    return root / run_id / f"process-{process}"


def process_folders(run_folder: Path) -> dict[int, Path]:
    """Returns the processes that left or have a folder, by their number."""
    found = {}
    try:
        folders = list(run_folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # its last process may just remove it
        folders = []
    for folder in folders:
        match = _FOLDER.fullmatch(folder.name)
        if match and folder.is_dir() and not folder.is_symlink():
            found[int(match[1])] = folder
    return dict(sorted(found.items()))


def stored_rings(folder: Path) -> tuple[StoredRing, ...]:
    """Returns the rings in a process's folder, by their names alone."""
    found = []
    for path in folder.iterdir():
        match = _RING.fullmatch(path.name)
        if match:
            found.append(StoredRing(path, RingRole(match[1]), LogicalRank.parse(match[2])))
    return tuple(sorted(found))


def folder_bytes(folder: Path) -> int:
    """Returns how much memory or disk the files of a folder take."""
    total_bytes = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # its process has just removed it
            total_bytes += path.lstat().st_blocks * 512
    return total_bytes


def left_behind(root: Path, run_id: str) -> tuple[int, ...]:
    """Returns the processes of a run that left a store here and don't live: it may be adopted."""
    folders = process_folders(root / run_id)
    return tuple(n for n, folder in folders.items() if lock_owner(folder / LOCK_NAME) is None)


class StoreDirectory(Closing):
    """The files of one process, locked while it is open; what a former process left is adopted.

    One thread at a time opens and creates files.
    """

    def __init__(self, root: Path, identity: StoreIdentity, process: int) -> None:
        """Makes the folder where it is missing, and locks it.

        Args:
            identity: the run; files of another one are refused.
            process: number of the process in the job, or of the one whose store is adopted.

        Raises:
            StoreLockedError: a live process has it.
            UserError: the folder can't be made, or is another user's.
        """
        self.root = root
        self.identity = identity
        self.process = process
        self.folder = process_folder(root, identity.run_id, process)
        self._lock = self._enter()
        self._rings: dict[tuple[RingRole, LogicalRank], RingFile] = {}
        self._journal: Journal | None = None
        self.reserve: NamelessFile | None = None
        """Memory for the next own ring that is made."""
        self.reserve_of_copies: list[NamelessFile] = []
        """Memory for the next rings of copies."""
        try:
            self._remove_unfinished()
        except BaseException:  # as in `StoreLock`
            self._lock.close()
            raise

    def _enter(self) -> StoreLock:
        try:
            while True:
                # The process that has just held the folder may remove it, and the run's with it.
                with contextlib.suppress(FileNotFoundError):
                    make_folders(self.root, self.folder.parent, self.folder)
                    return StoreLock(self.folder / LOCK_NAME)
        except OSError as error:
            raise UserError(
                f"can't make the store {self.folder}: {error.strerror or error}; give another "
                "--moevement-store-dir"
            ) from error

    def _remove_unfinished(self) -> None:
        for unfinished in self.folder.glob(f"*{CREATING_SUFFIX}"):
            unfinished.unlink(missing_ok=True)

    def read_again(self) -> None:
        """Forgets what is known of the journal beyond its file, as if the process were new.

        After an interrupt at any instruction, the file is what was made to be consistent.
        """
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        self._remove_unfinished()

    def check_space(self, announced_bytes: int) -> None:
        """Checks that the file system can hold all that is going to be created.

        Args:
            announced_bytes: sizes of all files of this process; those that are there count.

        Raises:
            UserError: it can't.
        """
        left_bytes = free_bytes(self.folder) + folder_bytes(self.folder)
        left_bytes += 0 if self.reserve is None else self.reserve.total_bytes
        left_bytes += sum(each.total_bytes for each in self.reserve_of_copies)
        if announced_bytes > left_bytes:
            raise out_of_space(self.folder, announced_bytes, left_bytes)

    def open_journal(self) -> Journal | None:
        """Returns the journal that is there, None when there is none or a damaged one.

        Raises:
            UserError: it is another job's.
        """
        if self._journal is None:
            path = self.folder / JOURNAL_NAME
            try:
                self._journal = Journal.open(path, self.identity)
            except FileNotFoundError:
                return None
            except DamagedFileError as error:
                logger.warning("%s; it counts as missing", str(error))
                return None
        return self._journal

    def journal(self, shape: JournalShape) -> Journal:
        """Returns the journal that is there, or a new one.

        Raises:
            UserError: it is another job's or of other sizes, or the file system is full.
        """
        found = self.open_journal()
        if found is None:
            path = self.folder / JOURNAL_NAME
            found = Journal.create(path, self.identity, shape)
        if found.shape.last_step < shape.last_step:  # a longer run
            found = found.extended(shape.last_step)
        self._journal = found
        # A shorter run leaves room unused.
        there = dataclasses.replace(found.shape, last_step=shape.last_step)
        self._check_shape(found.path, there, shape)
        return found

    def begin_journal(
        self,
        shape: JournalShape,
        state: JournalState,
        losses: Mapping[int, float],
        schedules: Mapping[str, bytes],
    ) -> None:
        """Puts a journal of a history that begins anew in the place of the one that is there.

        Args:
            schedules: that the state names.

        Raises:
            UserError: the file system is full; the former one is still there.
        """
        path = self.folder / JOURNAL_NAME
        journal = Journal.create(
            path, self.identity, shape, state=state, losses=losses, schedules=schedules
        )
        former, self._journal = self._journal, journal
        if former is not None:
            former.close()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is there but the lock, and what is said of the run."""
        told = {LOCK_NAME, RUN_NAME, STATUS_NAME, ORIGIN_NAME}
        return {path.name for path in self.folder.iterdir()} <= told

    @property
    def is_pinned(self) -> bool:
        """Whether the device may copy into one of the open rings."""
        return any(ring.is_pinned for ring in self._rings.values())

    def rings(self) -> tuple[StoredRing, ...]:
        """Returns the rings that are there."""
        return stored_rings(self.folder)

    def open_ring(self, role: RingRole, owner: LogicalRank) -> RingFile | None:
        """Returns a ring that is there, None when there is none or a damaged one.

        Raises:
            UserError: it is another job's.
        """
        found = self._rings.get((role, owner))
        if found is None:
            path = self._ring_path(role, owner)
            try:
                found = RingFile.open(path, self.identity)
                if found.owner != owner:
                    found.close()
                    raise DamagedFileError(f"{path} holds slots of {found.owner}")
            except FileNotFoundError:
                return None
            except DamagedFileError as error:
                logger.warning("%s; its slots count as lost", str(error))
                return None
            self._rings[role, owner] = found
        return found

    def ring(self, role: RingRole, owner: LogicalRank, shape: RingShape) -> RingFile:
        """Returns the ring that is there, or a new one.

        Raises:
            UserError: it is another job's or of another shape, or the file system is full.
        """
        found = self.open_ring(role, owner)
        if found is None:
            return self.create_ring(role, owner, shape)
        self._check_shape(found.path, found.shape, shape)
        return found

    def create_ring(self, role: RingRole, owner: LogicalRank, shape: RingShape) -> RingFile:
        """Returns a new, empty ring; one that is there is lost.

        Raises:
            UserError: the file system is full.
        """
        self.drop_ring(role, owner)
        path, reserve = self._ring_path(role, owner), None
        if role is RingRole.OWN and self.reserve and self.reserve.fits(shape.total_bytes):
            reserve, self.reserve = self.reserve, None
        elif role is RingRole.HELD:
            fitting = (each for each in self.reserve_of_copies if each.fits(shape.total_bytes))
            if (reserve := next(fitting, None)) is not None:
                self.reserve_of_copies.remove(reserve)
        created = RingFile.create(path, self.identity, owner, shape, reserve)
        self._rings[role, owner] = created
        return created

    def drop_ring(self, role: RingRole, owner: LogicalRank) -> None:
        """Removes a ring with all its slots; nothing happens where there is none."""
        if (opened := self._rings.pop((role, owner), None)) is not None:
            opened.close()
        self._ring_path(role, owner).unlink(missing_ok=True)

    def clear(self) -> None:
        """Removes the journal and all rings."""
        self.close_files()
        (self.folder / JOURNAL_NAME).unlink(missing_ok=True)
        self.clear_rings()

    def clear_rings(self) -> None:
        """Removes all rings."""
        for stored in self.rings():
            self.drop_ring(stored.role, stored.owner)

    def drop_reserve(self) -> None:
        """Gives back the memory of rings that need not be made."""
        reserve, self.reserve = self.reserve, None
        for each in (*([] if reserve is None else [reserve]), *self.reserve_of_copies):
            each.close()
        self.reserve_of_copies.clear()

    def close_files(self) -> None:
        """Lets go of all files: others may take their place, and are opened when they are used."""
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def close(self) -> None:
        """Lets go of all files and of the lock; the files stay for the next launch."""
        self.close_files()
        self.drop_reserve()
        self._lock.close()

    def remove(self) -> None:
        """Removes the files, as at the end of a run or after they were saved, and lets go."""
        remove_folder(self.folder)
        self.close()

    def _ring_path(self, role: RingRole, owner: LogicalRank) -> Path:
        return self.folder / f"{role.value}-{owner}.ring"

    def _check_shape(
        self, path: Path, found: RingShape | JournalShape, wanted: RingShape | JournalShape
    ) -> None:
        if found != wanted:
            raise UserError(
                f"{path} was made with {found.document()} and this launch needs "
                f"{wanted.document()}; launch with the flags of the former launch, or "
                f"remove its state with `moevement clean --run-id {self.identity.run_id}`"
            )


def make_folders(root: Path, *folders: Path) -> None:
    """Makes folders below a store directory for this user alone, the outermost first.

    Raises:
        FileNotFoundError: somebody has just removed one.
        OSError: the system refuses.
        UserError: one of them is another user's, or another user could put its own in their place.
    """
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_folder(root, "--moevement-store-dir")
    for folder in folders:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
            raise UserError(f"{folder} is another user's; give another --moevement-store-dir")
        folder.chmod(0o700)


def remove_folder(folder: Path) -> None:
    """Removes the folder of a process, its lock last, and the run's folder with the last of them.

    The caller has the lock. What somebody else has removed meanwhile is gone, too; once the lock's
    file is gone, a process that removes what others left may make a new one, and removes the rest.
    """
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            if path.name != LOCK_NAME:
                path.unlink(missing_ok=True)
        (folder / LOCK_NAME).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # somebody else has it now
            folder.rmdir()
    with contextlib.suppress(OSError):  # not the last process of the run
        folder.parent.rmdir()
