# SPDX-License-Identifier: Apache-2.0
"""The writer of tiers: beside training, each slot as it comes, and a tier whole or not at all."""

import contextlib
import dataclasses
import io
import logging
import os
import queue
import threading

import pytest

from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.tiers.tier import Manifest
from megatron_moevement.runtime.priority import BACKGROUND_NICE
from megatron_moevement.runtime.slots.journal import Journal, JournalShape
from megatron_moevement.runtime.slots.ring_file import RingFile
from megatron_moevement.runtime.tiers.manifests import (
    begun_tiers,
    parts_there,
    read_manifest,
    whole_tiers,
    write_manifest,
)
from megatron_moevement.runtime.tiers.target import open_target
from megatron_moevement.runtime.tiers.writer import Due, TierWriter

from .conftest import IDENTITY, OWNER, WINDOW, fill, named, slots_of, told
from .test_tiers import write

OTHER = LogicalRank(pp=2)
PATIENCE_S = 60


def wait_until(condition):
    while not condition():
        threading.Event().wait(0.01)


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
            other.take(record)[:] = self.ring.buffer(record.step)
            other.publish(record)
        return other

    def offer(self, rank, name):
        slots = slots_of(self.rings[rank], name)
        self.writers[rank].offer(Due(slots, told(rank), self.journal, 0.0))

    def wait_for_part(self, rank, name):
        wait_until(lambda: rank in {part.rank for part in parts_there(self.target, name)})

    def wait_for_failures(self, rank, count):
        wait_until(lambda: self.writers[rank]._failures == count)

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
    wait_until(lambda: begun_tiers(job.target) == [second])
    job.close()
    assert whole_tiers(job.target) == [second]


def test_a_tier_without_the_part_of_a_rank_is_never_whole(job, caplog):
    for committed in (5, 7, 9, 11, 13, 15):
        job.offer(OWNER, named(committed))
        job.wait_for_part(OWNER, named(committed))
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


def test_the_thread_that_writes_has_a_low_priority(job):
    thread = job.writers[OWNER]._thread.native_id
    job.offer(OWNER, named(5))
    job.wait_for_part(OWNER, named(5))
    assert os.getpriority(os.PRIO_PROCESS, thread) == BACKGROUND_NICE


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
        assert caplog.text == ""
        job.offer(OWNER, named(9))
        assert "no tier of step 7" in caplog.text
        assert "that of step 5 is still being written" in caplog.text
        released.append(None)
        job.offer(OTHER, named(9))
        assert job.wait()[0].name == named(9)


class HangingFile(io.BytesIO):
    """A file whose target takes nothing until it is released."""

    def __init__(self):
        super().__init__()
        self.entered, self.released = threading.Event(), threading.Event()

    def write(self, data):
        self.entered.set()
        assert self.released.wait(PATIENCE_S)
        return super().write(data)


def test_a_write_that_hangs_keeps_no_memory_of_a_ring_that_was_closed(job):
    file = HangingFile()
    job.target.create = lambda _: contextlib.nullcontext(file)
    job.offer(OTHER, named(5))
    assert file.entered.wait(PATIENCE_S)
    ring = job.rings[OTHER]
    ring.close()
    assert ring._mapping.closed
    file.released.set()
    job.wait_for_failures(OTHER, 1)


def test_what_a_target_refuses_is_a_line_and_the_next_window_is_written(job, caplog, monkeypatch):
    real = job.target.create

    def refuse(name):
        raise OSError(28, "No space left on device")

    job.target.create = refuse
    for count in range(1, 5):
        job.offer(OWNER, named(count))
        job.wait_for_failures(OWNER, count)
    told = "No space left on device"
    wait_until(lambda: caplog.text.count(told) == 3)  # of the first, second and fourth
    lines = [one for one in caplog.records if told in one.getMessage()]
    assert [one.levelno for one in lines] == [logging.WARNING] * 3
    job.target.create = real
    job.offer(OWNER, named(9))
    job.offer(OTHER, named(9))
    assert job.wait()[0].name == named(9)


def test_what_never_becomes_whole_makes_room_though_nothing_else_can_be_written(job, caplog):
    job.offer(OWNER, named(5))
    job.wait_for_part(OWNER, named(5))

    def refuse(name):
        raise OSError(28, "No space left on device")

    job.target.create = refuse
    job.offer(OWNER, named(7))
    job.wait_for_failures(OWNER, 1)
    assert begun_tiers(job.target) == [named(5)]
    job.offer(OWNER, named(9))
    wait_until(lambda: begun_tiers(job.target) == [])
    job.wait_for_failures(OWNER, 3)  # the part that is lacking, and what is refused


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
    job.wait_for_part(OTHER, named(5))
    assert whole_tiers(job.target) == []


def test_a_slot_is_written_as_soon_as_it_is_captured(target, ring, shared_memory):
    """What is left when the window is persisted: the losses, the description, the manifest."""
    read, payload = [], ring.payload

    def note(record):
        read.append(record.step)
        return payload(record)

    ring.payload = note
    with contextlib.closing(Job(target, ring, shared_memory)) as job:
        job.writers[OTHER].close()
        for step in (2, 3):
            assert step not in read
            ring.publish(dataclasses.replace(fill(ring, step, byte=step), rollbacks=3))
            job.writers[OWNER].captured(slots_of(ring))
            wait_until(lambda: step in read)  # noqa: B023
        assert parts_there(job.target, named()) == []
        fill(ring, 5, byte=77)  # takes the buffer of S_2, of which all is written
        job.offer(OWNER, named())
        job.wait_for_part(OWNER, named())


def test_a_window_that_was_never_persisted_is_not_written(job, caplog):
    first, second = named(5), named(7)
    writer = job.writers[OWNER]
    writer.captured(slots_of(job.ring, first))
    wait_until(lambda: writer._taken == first)
    job.offer(OWNER, second)
    job.wait_for_part(OWNER, second)
    assert parts_there(job.target, first) == []
    assert "no tier of step 5" in caplog.text


def test_a_window_that_was_read_in_time_is_written_though_the_next_one_is_persisted(job):
    first, second = named(5), named(7)
    writer = job.writers[OWNER]
    real, entered, released = job.target.sync, threading.Event(), threading.Event()

    def hang(file):
        real(file)
        entered.set()
        assert released.wait(PATIENCE_S)

    job.target.sync = hang
    writer.captured(slots_of(job.ring, first))
    assert entered.wait(PATIENCE_S)
    job.offer(OWNER, first)
    job.offer(OWNER, second)
    released.set()
    job.wait_for_part(OWNER, first)
    job.wait_for_part(OWNER, second)
    assert writer._failures == 0


def test_a_writer_that_hangs_beyond_its_end_removes_nothing(job):
    """Its generation is over; another one has written a tier in the meantime."""
    job.offer(OTHER, named(5))
    job.wait_for_part(OTHER, named(5))
    real, entered, released = job.target.names, threading.Event(), threading.Event()

    def hang(folder=""):
        found = real(folder)
        if not entered.is_set() and not folder:
            entered.set()
            assert released.wait(PATIENCE_S)
        return found

    job.target.names = hang
    writer = job.writers[OWNER]
    job.offer(OWNER, named(7))
    assert entered.wait(PATIENCE_S)
    writer.close()
    later = named(7, "f" * 16)
    part = write(job.target, job.ring, later)
    write_manifest(job.target, Manifest(later, WINDOW, (part,)))
    released.set()
    writer._thread.join(PATIENCE_S)
    assert not writer._thread.is_alive()
    assert whole_tiers(job.target) == [later]
    assert begun_tiers(job.target) == [named(5), later]
