# SPDX-License-Identifier: Apache-2.0
"""Parts of tiers: written beside training, whole or of no use, and read back to the same bytes."""

import contextlib
import dataclasses
import logging
import os
import queue
import threading

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.policy.copies.journal_state import JournalState
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.tiers.tier import Manifest, TierName
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.policy.window.timetable import Timetable, TimetableEntry
from megatron_moevement.runtime.slots.journal import Journal, JournalShape
from megatron_moevement.runtime.slots.ring_file import RingFile
from megatron_moevement.runtime.tiers import target as targets
from megatron_moevement.runtime.tiers.manifests import (
    begun_tiers,
    parts_there,
    read_manifest,
    whole_tiers,
    write_manifest,
)
from megatron_moevement.runtime.tiers.part import (
    DamagedPartError,
    LostSlotError,
    Told,
    load_slots,
    read_part,
    write_part,
)
from megatron_moevement.runtime.tiers.target import open_target
from megatron_moevement.runtime.tiers.writer import Due, TierWriter

from .conftest import IDENTITY, OWNER, fill

WINDOW = Window(2, 2)
STATE = JournalState(3, Timetable((TimetableEntry(0, 0, 2, "d"),)), 5, WINDOW, OWNER)
OTHER = LogicalRank(pp=2)
PATIENCE_S = 60
LOSSES = b"what a journal has"


@pytest.mark.parametrize("place", ["s3://another", "s3://another/folder"])
def test_a_bucket_that_is_not_there_is_not_made(object_store, place):
    target = open_target(place, "run-1")
    with pytest.raises(FileNotFoundError), target.create("folder/name"):
        pass
    assert object_store.system.ls("") == []


@pytest.fixture
def full(ring):
    """Returns a ring with the slots of the window."""
    for step in (2, 3):
        record = fill(ring, step, byte=step)
        ring.publish(dataclasses.replace(record, rollbacks=3))
    return ring


def named(committed=5, writers="0" * 16):
    return TierName(3, committed, writers)


def told(owner=OWNER):
    return Told(dataclasses.replace(STATE, rank=owner), {4: b"{}", 5: b'{"a": 1}'}, {"d": b"x"})


def write(target, ring, name=None, proceed=lambda: None):
    return write_part(
        *(target, name or named(), ring, told()), losses=[LOSSES[:3], LOSSES[3:]], proceed=proceed
    )


def empty_copy(ring, folder):
    return RingFile.create(folder / "copy.ring", IDENTITY, OWNER, ring.shape)


def test_a_part_comes_back_with_every_byte(target, full, shared_memory):
    part = read_part(target, named(), write(target, full))
    assert (part.told, part.owner, part.identity) == (told(), OWNER, IDENTITY)
    with contextlib.closing(empty_copy(full, shared_memory)) as copy:
        assert load_slots(target, named(), part, copy, rollbacks=8) == LOSSES
        for record, original in zip(copy.records(), full.records(), strict=True):
            assert dataclasses.replace(record, rollbacks=3) == original
            assert record.rollbacks == 8
            assert copy.damaged_parts(record) == ()


def test_files_are_ours_alone(tmp_path, full):
    write(open_target(str(tmp_path / "tiers"), "run-1"), full)
    files = [path for path in (tmp_path / "tiers").rglob("*") if path.is_file()]
    assert len(files) == 2
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert {path.parent.stat().st_mode & 0o777 for path in files} == {0o700}


@pytest.mark.parametrize("place", ["slots", "json"])
def test_a_part_with_one_wrong_byte_is_none(tmp_path, full, shared_memory, place):
    target = open_target(str(tmp_path / "tiers"), "run-1")
    name = write(target, full)
    (path,) = (tmp_path / "tiers").rglob(f"*.{place}")
    sizes = path.stat().st_size
    for offset in (0, sizes // 2, sizes - 1):
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        path.write_bytes(data)
        with (
            contextlib.closing(empty_copy(full, shared_memory)) as copy,
            pytest.raises(DamagedPartError),
        ):
            load_slots(target, named(), read_part(target, named(), name), copy, rollbacks=8)
        data[offset] ^= 1
        path.write_bytes(data)
    path.write_bytes(bytes(data[:-1]))
    with (
        contextlib.closing(empty_copy(full, shared_memory)) as copy,
        pytest.raises(DamagedPartError),
    ):
        load_slots(target, named(), read_part(target, named(), name), copy, rollbacks=8)


def test_a_description_or_manifest_with_one_wrong_byte_is_none(tmp_path, full):
    target = open_target(str(tmp_path / "tiers"), "run-1")
    part = write(target, full)
    write_manifest(target, Manifest(named(), WINDOW, "run-1", "0123abcd", (part,)))
    for path, read in (
        (next((tmp_path / "tiers").rglob("*.json")), lambda: read_part(target, named(), part)),
        (next((tmp_path / "tiers").rglob("*.manifest")), lambda: read_manifest(target, named())),
    ):
        read()
        whole = path.read_bytes()
        for offset in range(len(whole)):
            path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
            with pytest.raises(DamagedPartError):
                read()
        path.write_bytes(whole[:-1])
        with pytest.raises(DamagedPartError):
            read()


def test_a_file_has_its_name_when_all_of_it_is_there(tmp_path):
    target = open_target(str(tmp_path / "tiers"), "run-1")
    with target.create("tier/part") as file:
        file.write(b"12")
        assert target.names("tier") == []
    assert target.names("tier") == ["part"]
    with pytest.raises(RuntimeError), target.create("tier/other") as file:
        raise RuntimeError
    assert [path.name for path in (tmp_path / "tiers" / "run-1" / "tier").iterdir()] == ["part"]


def test_slots_that_nothing_describes_do_not_stay(target, full):
    create = target.create

    def refuse(name):
        if name.endswith(".json"):
            raise OSError(28, "No space left on device")
        return create(name)

    target.create = refuse
    with pytest.raises(OSError, match="No space"):
        write(target, full)
    assert target.names(str(named())) == []


@pytest.mark.parametrize("pieces", range(6))
def test_a_slot_that_training_overwrites_meanwhile_is_given_up(target, full, pieces):
    """Before each piece: those that were read before are of the window, the others are not."""
    passed = []

    def overwrite():
        if len(passed) == pieces:
            fill(full, 5, byte=77)  # takes the buffer of S_2
            fill(full, 6, byte=78)
        passed.append(None)

    with pytest.raises(LostSlotError, match="overwritten before it was read"):
        write(target, full, proceed=overwrite)
    assert parts_there(target, named()) == []
    assert [name for name in target.names(str(named())) if name.endswith(".slots")] == []


def test_a_damaged_slot_is_not_written(target, full):
    full.payload(full.held(3))[60] ^= 1
    with pytest.raises(LostSlotError, match="head in the slot of step 3 is damaged in memory"):
        write(target, full)
    assert parts_there(target, named()) == []


@pytest.mark.parametrize("state", [{"rollbacks": 4}, {"persisted": Window(2, 2, 1)}])
def test_slots_of_another_history_are_not_written(target, full, state):
    other = dataclasses.replace(told(), state=dataclasses.replace(STATE, **state))
    with pytest.raises(LostSlotError):
        write_part(
            target, named(), full, other, losses=[LOSSES[:3], LOSSES[3:]], proceed=lambda: None
        )


def test_a_url_that_nothing_reads_is_an_error():
    with pytest.raises(UserError, match="--moevement-tier-dir nothing://x"):
        open_target("nothing://x", "run-1")


class Job:
    """Writers of two ranks, with a journal, and what the first one says of whole tiers."""

    def __init__(self, target, ring, folder, keep=1):
        self.target = target
        self.ring = ring
        self.rings = {OWNER: ring, OTHER: self._other(folder)}
        self.journal = Journal.create(folder / "journal", IDENTITY, JournalShape(4, 50, 20))
        self.whole = queue.SimpleQueue()
        self.writers = {
            rank: TierWriter(
                *(target, (OWNER, OTHER), rank, keep),
                lambda manifest, duration_s: self.whole.put((manifest, duration_s)),
            )
            for rank in self.rings
        }

    def _other(self, folder):
        other = RingFile.create(folder / "other.ring", IDENTITY, OTHER, self.ring.shape)
        for record in self.ring.records():
            other.buffer(record.step)[:] = self.ring.buffer(record.step)
            other.publish(record)
        return other

    def offer(self, rank, name):
        self.writers[rank].offer(Due(name, told(rank), self.rings[rank], self.journal, 0.0))

    def close(self):
        for writer in self.writers.values():
            writer.close()
        self.rings[OTHER].close()
        self.journal.close()

    def wait(self):
        return self.whole.get(timeout=PATIENCE_S)


@pytest.fixture
def job(target, full, shared_memory):
    with contextlib.closing(Job(target, full, shared_memory)) as made:
        yield made


def test_a_tier_is_whole_once_all_parts_are_there_and_the_oldest_goes(job):
    first, second = named(5), named(7)
    job.offer(OTHER, first)
    job.offer(OWNER, first)
    manifest, _ = job.wait()
    assert manifest == read_manifest(job.target, first)
    assert {part.rank for part in manifest.parts} == {OWNER, OTHER}
    assert manifest.size_bytes == 2 * 2 * (40 + 100 + 21)
    job.offer(OWNER, second)
    job.offer(OTHER, second)
    assert job.wait()[0].name == second
    job.close()
    assert whole_tiers(job.target) == [second]
    assert begun_tiers(job.target) == [second]


def test_a_tier_without_the_part_of_a_rank_is_never_whole(job, caplog):
    for committed in (5, 7, 9, 11, 13, 15):
        job.offer(OWNER, named(committed))
        while job.writers[OWNER]._due is not None:
            threading.Event().wait(0.01)
    job.offer(OTHER, named(15))
    assert job.wait()[0].name == named(15)
    job.close()
    assert whole_tiers(job.target) == [named(15)]
    assert job.whole.empty()
    lines = [one.getMessage() for one in caplog.records]
    assert [line.split(" in ")[0] for line in lines] == [
        f"no tier of step {committed}" for committed in (5, 7, 11)
    ]
    assert f"1 parts are lacking, as that of {OTHER}" in lines[0]


def test_the_thread_that_writes_has_the_lowest_priority(job):
    thread = job.writers[OWNER]._thread.native_id
    job.offer(OWNER, named(5))
    while len(parts_there(job.target, named(5))) < 1:
        threading.Event().wait(0.01)
    assert os.getpriority(os.PRIO_PROCESS, thread) == 19


def test_training_does_not_wait_for_a_target_that_hangs(full, shared_memory, tmp_path, caplog):
    target, entered, released = open_target(str(tmp_path), "run"), threading.Event(), []
    create = target.create

    @contextlib.contextmanager
    def hang(name):
        entered.set()
        while not released:
            threading.Event().wait(0.01)
        with create(name) as file:
            yield file

    target.create = hang
    with contextlib.closing(Job(target, full, shared_memory)) as job:
        job.offer(OWNER, named(5))
        assert entered.wait(PATIENCE_S)
        job.offer(OWNER, named(7))  # returns at once
        assert "no tier of step 7" in caplog.text
        assert "that of step 5 is still being written" in caplog.text
        released.append(None)
        job.offer(OTHER, named(5))
        assert job.wait()[0].name == named(5)


def test_what_a_target_refuses_is_a_line_and_the_next_window_is_written(job, caplog, monkeypatch):
    real, refused = job.target.create, []

    def refuse(name):
        refused.append(name)
        raise OSError(28, "No space left on device")

    job.target.create = refuse
    for count in range(1, 5):
        job.offer(OWNER, named(5))
        while len(refused) < count or job.writers[OWNER]._due is not None:
            threading.Event().wait(0.01)
    lines = [one for one in caplog.records if "No space left on device" in one.getMessage()]
    assert [one.levelno for one in lines] == [logging.WARNING] * 3  # of the first, second, fourth
    job.target.create = real
    job.offer(OWNER, named(9))
    job.offer(OTHER, named(9))
    assert job.wait()[0].name == named(9)


def test_what_never_becomes_whole_makes_room_though_nothing_else_can_be_written(job, caplog):
    job.offer(OWNER, named(5))
    while len(parts_there(job.target, named(5))) < 1 or job.writers[OWNER]._due is not None:
        threading.Event().wait(0.01)

    def refuse(name):
        raise OSError(28, "No space left on device")

    job.target.create = refuse
    for committed in (7, 9):
        assert begun_tiers(job.target) == [named(5)]
        job.offer(OWNER, named(committed))
        while job.writers[OWNER]._due is not None:
            threading.Event().wait(0.01)
    assert begun_tiers(job.target) == []


def test_a_manifest_that_could_not_be_written_is_tried_again(job, caplog):
    real, refused = job.target.create, []

    def refuse(name):
        if name.endswith(".manifest") and len(refused) < 2:
            refused.append(name)
            raise OSError(28, "No space left on device")
        return real(name)

    job.target.create = refuse
    job.offer(OTHER, named(5))
    job.offer(OWNER, named(5))
    assert job.wait()[0].name == named(5)
    assert len(refused) == 2
    assert "No space left on device" in caplog.text


def test_a_writer_that_is_closed_declares_nothing(job):
    job.writers[OWNER].close()
    job.offer(OTHER, named(5))
    while len(parts_there(job.target, named(5))) < 1:
        threading.Event().wait(0.01)
    assert whole_tiers(job.target) == []


def test_a_folder_in_which_another_user_may_rename_is_refused(tmp_path, full):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(UserError, match=targets.FLAG):
        open_target(str(folder), "run-1")
    folder.chmod(0o700)
    target = open_target(str(folder), "run-1")
    folder.chmod(0o777)
    with pytest.raises(UserError, match=targets.FLAG):
        write(target, full)
