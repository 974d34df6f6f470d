# SPDX-License-Identifier: Apache-2.0
"""What lies in a store directory: everybody's files, looked at without a lock and never written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_moevement.errors import UserError
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.runtime.slots.journal import Journal, JournalState
from megatron_moevement.runtime.slots.mapped_file import Access
from megatron_moevement.runtime.slots.ring_file import RingFile
from megatron_moevement.runtime.slots.slot_record import SlotRecord
from megatron_moevement.runtime.slots.store_identity import DamagedFileError, StoreIdentity
from megatron_moevement.runtime.stores.store import (
    JOURNAL_NAME,
    LOCK_NAME,
    RingRole,
    StoredRing,
    folder_bytes,
    process_folders,
    stored_rings,
)
from megatron_moevement.runtime.stores.store_lock import lock_owner


@dataclasses.dataclass(frozen=True)
class SurveyedSlot:
    """A slot in a ring.

    Attributes:
        payload_offset: where in the file its payload begins.
        damaged: the parts whose bytes are not those that were captured.
    """

    record: SlotRecord
    payload_offset: int
    damaged: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class SurveyedRing:
    """A ring of a process; sizes and slots are there when its header is readable."""

    path: Path
    role: RingRole
    owner: LogicalRank
    identity: StoreIdentity | None = None
    size_bytes: int = 0
    capacity: int = 0
    room_bytes: int = 0
    slots: tuple[SurveyedSlot, ...] = ()
    trouble: str | None = None


@dataclasses.dataclass(frozen=True)
class SurveyedJournal:
    """A journal of a process."""

    identity: StoreIdentity | None = None
    state: JournalState | None = None
    entries: range = range(0)
    losses: int = 0
    trouble: str | None = None


@dataclasses.dataclass(frozen=True)
class SurveyedProcess:
    """The files of one process.

    Attributes:
        locked_by: who has them open; None when nobody has.
    """

    process: int
    folder: Path
    locked_by: Mapping[str, Any] | None
    size_bytes: int
    journal: SurveyedJournal | None
    rings: tuple[SurveyedRing, ...]


@dataclasses.dataclass(frozen=True)
class SurveyedRun:
    """The processes of one run that have a store on this machine."""

    run_id: str
    processes: tuple[SurveyedProcess, ...]

    @property
    def identity(self) -> StoreIdentity | None:
        """What the first readable file says."""
        for process in self.processes:
            for file in (process.journal, *process.rings):
                if file is not None and file.identity is not None:
                    return file.identity
        return None


def run_folders(store_dir: Path) -> tuple[Path, ...]:
    """Returns the folders of the runs in a store directory.

    Raises:
        UserError: it can't be read.
    """
    try:
        folders = [folder for folder in store_dir.iterdir() if process_folders(folder)]
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise UserError(f"can't read {store_dir}: {error.strerror or error}") from error
    return tuple(sorted(folders))


def survey(store_dir: Path, *, compared: bool = True) -> tuple[SurveyedRun, ...]:
    """Returns all that lies in a store directory.

    Args:
        compared: whether every slot is read and its checksums are compared.

    Raises:
        UserError: the folder can't be read.
    """
    runs = (
        SurveyedRun(run.name, _surveyed_processes(run, compared)) for run in run_folders(store_dir)
    )
    return tuple(run for run in runs if run.processes)


def _surveyed_processes(run: Path, compared: bool) -> tuple[SurveyedProcess, ...]:
    found = []
    for process, folder in process_folders(run).items():
        try:
            found.append(_surveyed_process(process, folder, compared))
        except FileNotFoundError:
            continue  # its process has just removed it
        except OSError as error:
            raise UserError(f"can't read {folder}: {error.strerror or error}") from error
    return tuple(found)


def _surveyed_process(process: int, folder: Path, compared: bool) -> SurveyedProcess:
    return SurveyedProcess(
        process=process,
        folder=folder,
        locked_by=lock_owner(folder / LOCK_NAME),
        size_bytes=folder_bytes(folder),
        journal=_surveyed_journal(folder / JOURNAL_NAME),
        rings=tuple(_surveyed_ring(ring, compared) for ring in stored_rings(folder)),
    )


def _surveyed_journal(path: Path) -> SurveyedJournal | None:
    try:
        journal = Journal.open(path, None, Access.READ)
    except FileNotFoundError:
        return None
    except (DamagedFileError, UserError) as error:
        return SurveyedJournal(trouble=str(error))
    found = SurveyedJournal(
        journal.identity, journal.state, journal.entries(), len(journal.losses())
    )
    journal.close()
    return found


def _surveyed_ring(stored: StoredRing, compared: bool) -> SurveyedRing:
    found = SurveyedRing(stored.path, stored.role, stored.owner)
    try:
        ring = RingFile.open(stored.path, None, Access.READ)
    except (DamagedFileError, FileNotFoundError, UserError) as error:
        return dataclasses.replace(found, trouble=str(error))
    found = dataclasses.replace(
        found,
        identity=ring.identity,
        size_bytes=ring.total_bytes,
        capacity=ring.capacity,
        room_bytes=ring.shape.room_bytes,
        slots=_surveyed_slots(ring, compared),
    )
    ring.close()
    return found


def _surveyed_slots(ring: RingFile, compared: bool) -> tuple[SurveyedSlot, ...]:
    slots = []
    for record in ring.records():
        damaged = ring.damaged_parts(record) if compared else ()
        # Its owner may have begun to overwrite it meanwhile: then it is no longer held.
        if ring.record(record.step) == record:
            slots.append(SurveyedSlot(record, ring.payload_offset(record), damaged))
    return tuple(slots)
