# SPDX-License-Identifier: Apache-2.0
"""The store of a process as it outlives generations: locked once, its files mapped once."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from megatron_moevement.backends.backend import Pin
from megatron_moevement.errors import MoEvementError, UserError
from megatron_moevement.policy.copies.left_stores import of_no_use
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.runtime.coordination.agreement import AgreementError
from megatron_moevement.runtime.coordination.generation import Generation
from megatron_moevement.runtime.slots.mapped_file import free_bytes
from megatron_moevement.runtime.slots.store_identity import RunIdentity, StoreIdentity
from megatron_moevement.runtime.stores.adoption import (
    adopt_store,
    remove_outdated,
    take_in_flushed,
    take_in_left,
)
from megatron_moevement.runtime.stores.flushing import flush_store, flushed_folder, remove_flushed
from megatron_moevement.runtime.stores.run_record import check_layout, write_run
from megatron_moevement.runtime.stores.store import (
    StoreDirectory,
    left_behind,
    process_folder,
    process_folders,
)
from megatron_moevement.runtime.stores.store_lock import StoreLockedError
from megatron_moevement.runtime.upstream_log.log import LogMemory
from megatron_moevement.strategies.moevement.protection.reserve import Reserve, ReserveSizes, Room
from megatron_moevement.strategies.resident_state import ProcessStore

_PATIENCE_WITH_ADOPTERS = timedelta(seconds=5)
_PATIENCE_WITH_THE_LAST = timedelta(seconds=5)
"""All remove their files at the end of a job; one that is killed meanwhile can't."""
_POLL_S = 0.05


class NotOpenedError(MoEvementError):
    """A process can't open its memory in a restart; another one may take its place."""


@dataclasses.dataclass(frozen=True)
class StoresOfRun:
    """The stores of a run's processes on this machine.

    Attributes:
        root: the store directory.
    """

    root: Path
    identity: StoreIdentity

    @property
    def folder(self) -> Path:
        """Where they lie."""
        return self.root / self.identity.run_id

    def left_behind(self) -> tuple[int, ...]:
        """Returns the processes that died and left their stores.

        Call it when all live processes of the run have locked theirs.
        """
        return left_behind(self.root, self.identity.run_id)

    def remove_left_behind(self, known: Collection[int]) -> None:
        """Removes what processes that died left.

        Call it when a window is persisted that the slots of the dead are not needed for.

        Args:
            known: whose stores are meant; what others have left since stays.
        """
        for process in of_no_use(self.left_behind(), known):
            # Another process may remove it just now; and what can't be removed is in nobody's way.
            with (
                contextlib.suppress(UserError),
                StoreDirectory(self.root, self.identity, process) as left,
            ):
                left.remove()


class SparePlace(NamedTuple):
    """Where a process without a rank has its store.

    Attributes:
        root: the store directory.
        process: its number.
        processes: of the job.
    """

    root: Path
    process: int
    processes: int


class ResidentStore(ProcessStore):
    """Opens the store of this process once; the training thread uses it."""

    def __init__(self) -> None:
        """Begins with nothing open."""
        self.store: StoreDirectory | None = None
        """The store, where it is open."""
        self._place: StoresOfRun | None = None
        self._is_wanted = True
        self.is_over = False
        """Whether this process waits for a place in a job of which a rank has finished."""
        self.adopts = False
        """Whether this process goes on with what others left, by its last opening."""
        self._has_rank = False
        self.pin: Pin | None = None
        """Pins what is reserved for a rank, in a process that waits for one."""
        self.reserve: Reserve | None = None
        """What this process has made without a rank; None before, and once it has a rank."""
        self.log_memory: LogMemory | None = None
        """Of that, what its log is to lie in."""
        self.flushed: tuple[Path, ...] = ()
        """Folders with what processes of the run flushed: wanted until a window is persisted."""
        self.refusal: str | None = None
        """Why this process can't have its files on its machine; None while it can."""

    @property
    def folder(self) -> Path | None:
        """Where the files lie; None before `open`."""
        return None if self.store is None else self.store.folder

    @property
    def has_state(self) -> bool:
        """Whether a later launch could go on from what is kept."""
        store = self.store
        journal = None if store is None or not store.folder.exists() else store.open_journal()
        return journal is not None and journal.state is not None

    def not_opened(self, error: AgreementError, generation: Generation) -> Exception:
        """Returns what it means that a process can't open its store or the files in it.

        Args:
            error: what all processes know of it.

        Returns:
            At the start of a job what its user has to mend. In a restart, where there is memory to
            be kept: an exception that leads to another one. Who is refused files by its own
            machine has noted that, and leaves.
        """
        if generation.number == 0:
            return UserError(error.reason)
        own = error.__cause__
        if isinstance(own, UserError):
            self.refusal = str(own)
        return NotOpenedError(str(error))

    def open(
        self,
        root: Path,
        identity: StoreIdentity,
        process: int,
        rank: LogicalRank | None,
        saves: Iterable[Path] = (),
        *,
        patience: timedelta = timedelta(0),
        run: RunIdentity | None = None,
    ) -> StoreDirectory:
        """Returns the store, which is opened the first time, in whichever generation that is.

        Args:
            root: the store directory.
            rank: of this process, which adopts the newest store of it; None: it adopts none.
            saves: folders of durable checkpoints, beside which stores may have been flushed.
            patience: how long to wait for a process that dies and still has its store locked.
            run: what the run is, to be kept beside the files.

        Raises:
            UserError: the memory of the run was made with another layout, or the store is in use,
                another user's, or can't be made.
        """
        self.adopts = rank is not None
        if self.store is None or not self._has_rank:
            flushed = tuple(flushed_folder(save, identity) for save in saves)
            if run is not None:
                check_layout([root / identity.run_id, *flushed], run)
            self._place = StoresOfRun(root, identity)
            if self.store is None:
                self.store = _await_store(root, identity, process)
            self.store.close_files()  # of what a spare keeps: a store that is adopted has more
            if self.reserve is not None:
                made = self.reserve.take()
                self.reserve, self.log_memory = None, made.log
                self.store.reserve, self.store.reserve_of_copies = made.ring, list(made.copies)
            self.flushed = flushed
            if rank is not None:
                adopt_store(self.store, rank, self.flushed, patience)
            if run is not None:
                write_run(self.store.folder, run)
            self._has_rank = True
        return self.store

    def hold(self, place: SparePlace, identity: StoreIdentity) -> StoreDirectory:
        """Returns the store of a process without a rank, which adopts nothing.

        What a former launch left under its number stays as it is: ranks adopt it, or have it taken
        in by `take_in_copies`.

        Raises:
            UserError: the store is in use, another user's, or can't be made.
        """
        if self.store is None:
            number = place.process
            while process_folder(place.root, identity.run_id, number).exists():
                number += place.processes
            self._place = StoresOfRun(place.root, identity)
            self.store = StoreDirectory(place.root, identity, number)
        return self.store

    def make_reserve(self, sizes: ReserveSizes, room: Room) -> None:
        """Begins to make what lacks of the memory of a rank; the store is open."""
        if self.reserve is None and self.store is not None and self.pin is not None:
            self.reserve = Reserve(self.store.folder, self.pin)
        if self.reserve is not None:
            self.reserve.make(sizes, room)

    def make_room(self, size_bytes: int, left_bytes: int) -> None:
        """Gives back what is in reserve for a rank, where it leaves no room for something else.

        Args:
            size_bytes: of what is going to be made in the store.
            left_bytes: that this process may take beside that and its files.
        """
        if self.reserve is None or self.store is None:
            return
        held_bytes = self.reserve.total_bytes
        short_bytes = max(held_bytes - left_bytes, size_bytes - free_bytes(self.store.folder))
        if 0 < short_bytes <= held_bytes:
            self.reserve.take().close()
            self.reserve = None

    def flush(self, save: Path) -> Path:
        """Writes the store to durable storage and removes it from memory; the job stops here.

        What dead processes left in the memory of this machine stays there.

        Raises:
            OSError: it could not be written; it is still in memory.
        """
        store = self.store
        if store is None:
            return super().flush(save)
        where = flush_store(store, save)
        store.remove()
        self.store = None  # not before: an interrupted removal is done again by `abandon`
        return where

    def take_in(self, rank: LogicalRank, ranks: Sequence[LogicalRank]) -> tuple[int, ...]:
        """Brings here what others left on this machine, or flushed, and nobody has adopted.

        Call it when all live processes of the run have locked their stores.

        Args:
            ranks: all ranks, which share what was flushed.

        Returns:
            The processes whose slots are here now.

        Raises:
            UserError: there is no room for what was flushed.
        """
        if self.store is None or not self.adopts:
            return ()
        flushed = take_in_flushed(self.store, self.flushed, rank, ranks)
        return (*take_in_left(self.store, replaces=not self.store.is_pinned), *flushed)

    def take_in_copies(self, place: SparePlace, identity: StoreIdentity) -> tuple[int, ...]:
        """Brings here, without a rank, what others left on this machine and no rank has adopted.

        Call it when all ranks have taken in what they need. Nothing of the store may be in use.

        Returns:
            The processes whose slots are here now.

        Raises:
            UserError: as `hold` does.
        """
        if not left_behind(place.root, identity.run_id):
            return ()
        store = self.hold(place, identity)
        taken = take_in_left(store)
        journal = store.open_journal()
        if journal is not None and journal.state is not None:
            journal.write_state(dataclasses.replace(journal.state, rank=None))
        return taken

    def remove_outdated(self) -> None:
        """Removes what others left here from before the window that the journal says persisted."""
        if self.store is not None:
            remove_outdated(self.store)

    def forget_flushed(self) -> None:
        """Removes what the processes of the run flushed; a window in memory is persisted."""
        for folder in self.flushed:
            remove_flushed(folder)
        self.flushed = ()

    def finish(self) -> None:
        """Lets `close` remove the files: nobody will go on from them."""
        self._is_wanted = False

    def end(self) -> None:
        """Learns, as a process without a rank, that the job is over."""
        self.is_over = True
        self.finish()

    def stay(self) -> None:
        """Has `close` leave the files after all: the job stops before all ranks have finished."""
        self._is_wanted = True

    def keep(self) -> None:
        """Begins a generation, which goes on from the files; `close` leaves them for the next."""
        self._is_wanted, self.is_over = True, False
        if self.store is not None:
            self.store.read_again()

    def abandon(self, patience: timedelta) -> None:
        """Removes the files of this process and, when they have ended, of the others of its run.

        A process that has just been killed has its lock until the system has taken it apart.
        """
        if self.store is not None:
            self.store.remove()
            self.store = None
        if self._place is None:
            return
        deadline_s = time.monotonic() + patience.total_seconds()
        while process_folders(self._place.folder):
            self._place.remove_left_behind(self._place.left_behind())
            if time.monotonic() >= deadline_s:
                return
            time.sleep(_POLL_S)
        with contextlib.suppress(OSError):  # another one has removed it
            self._place.folder.rmdir()

    def close(self) -> None:
        """Lets go of the files and of the lock."""
        store = self.store
        if self.reserve is not None:
            self.reserve.close()
        if store is None:
            return
        if not self._is_wanted:
            self.abandon(_PATIENCE_WITH_THE_LAST)
            return
        if store.folder.exists() and not store.is_empty:
            store.close()
        else:
            store.remove()
        self.store = None  # not before, as in `flush`


def _await_store(root: Path, identity: StoreIdentity, process: int) -> StoreDirectory:
    """Locks the store that a process left under this number, or a new one.

    A process of the same launch that adopts from it holds the lock while it moves files.

    Raises:
        UserError: it is another user's, or somebody keeps it locked.
    """
    deadline_s = time.monotonic() + _PATIENCE_WITH_ADOPTERS.total_seconds()
    while True:
        try:
            return StoreDirectory(root, identity, process)
        except StoreLockedError:
            if time.monotonic() >= deadline_s:
                raise
            time.sleep(_POLL_S)
