# SPDX-License-Identifier: Apache-2.0
"""A ring keeps what was published, and nothing that was torn, damaged or overwritten."""

import dataclasses
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_moevement.errors import UserError
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.slots.mapped_file import PAGE_BYTES, Access
from megatron_moevement.runtime.slots.ring_file import RingFile, RingShape
from megatron_moevement.runtime.slots.slot_record import (
    MalformedRecordError,
    SlotPart,
    SlotRecord,
    record_document,
    record_of_document,
)
from megatron_moevement.runtime.slots.store_identity import DamagedFileError, StoreIdentity

from .conftest import IDENTITY, OWNER, fill


def reopened(ring):
    return RingFile.open(ring.path, IDENTITY)


def test_a_published_slot_is_read_back_by_whoever_opens_the_file(ring):
    written = fill(ring, 4, byte=7)
    other = reopened(ring)
    assert other.records() == (written,)
    assert other.record(4) == written
    assert other.record(1) is None
    assert other.payload(written) == ring.payload(written)
    assert bytes(other.payload(written)[:3]) == bytes([7, 8, 9])
    assert other.damaged_parts(written) == ()
    assert (other.owner, other.shape) == (OWNER, RingShape.equal(3, 200, 3))
    assert other.identity == IDENTITY


def test_a_ring_that_is_pinned_late_is_used_at_once_and_unpinned_at_its_end(ring):
    begun, ends, pinned = threading.Event(), threading.Event(), []

    def pin(memory):
        begun.set()
        assert ends.wait(timeout=20)
        pinned.append(memory.nbytes)
        return pinned.clear

    adopted = reopened(ring)
    adopted.pin_soon(pin)
    adopted.pin_soon(lambda _: pytest.fail("pinned again"))
    assert begun.wait(timeout=20)
    assert (adopted.is_pinned, pinned) == (True, [])
    fill(adopted, 4, byte=7)
    ends.set()
    adopted.close()
    assert pinned == []
    assert not adopted.is_pinned


def test_a_ring_that_can_not_be_pinned_late_stays_as_it_is(ring, caplog):
    adopted = reopened(ring)

    def refuse(_):
        raise UserError("no memory may be locked")

    adopted.pin_soon(refuse)
    adopted.close()
    (line,) = caplog.messages
    assert "no memory may be locked" in line


def test_records_come_by_their_step_and_a_step_replaces_that_of_its_buffer(ring):
    for step in (2, 3, 4, 5):
        fill(ring, step, byte=step)
    assert [record.step for record in ring.records()] == [3, 4, 5]
    ring.invalidate(4)
    assert [record.step for record in reopened(ring).records()] == [3, 5]


def test_a_ring_of_another_version_is_damaged_for_who_only_looks(shared_memory):
    path = shared_memory / "old.ring"
    header = {"owner": str(OWNER), "capacity": 3, "buffer_bytes": 200, "max_parts": 3}
    with pytest.raises(DamagedFileError):
        RingFile._create(path, IDENTITY, header, total_bytes=2 * PAGE_BYTES)
    with pytest.raises(DamagedFileError, match=r"no ring of this version: KeyError\('room_bytes'"):
        RingFile.open(path, None, Access.READ)


def test_a_slot_without_a_descriptor_is_not_held(ring):
    fill(ring, 4, byte=7)
    ring.reserve(7)[:] = bytes(200)
    assert reopened(ring).records() == ()


def test_a_descriptor_counts_in_its_own_place_only(ring):
    fill(ring, 3, byte=3)
    fill(ring, 4, byte=3)
    ring._descriptor(1)[:] = bytes(ring._descriptor(0))
    assert [record.step for record in ring.records()] == [3]


def test_a_buffer_is_memory_that_tensors_and_arrays_share(ring):
    tensor = torch.frombuffer(ring.reserve(1), dtype=torch.float32)
    tensor[:] = torch.arange(50.0)
    record = ring.publish(SlotRecord(0, Window(0, 2), 1, 1, 200, ()))
    array = np.frombuffer(reopened(ring).payload(record), dtype=np.float32)
    assert array.tolist() == list(range(50))
    assert tensor.data_ptr() % PAGE_BYTES == 0


def test_a_tensor_outlives_the_closed_ring(ring):
    tensor = torch.frombuffer(ring.reserve(1), dtype=torch.uint8)
    ring.close()
    tensor[:] = 3
    assert tensor.sum() == 600
    with pytest.raises(ValueError, match="closed"):
        ring.buffer(1)


def test_the_file_is_for_its_user_alone_and_has_all_its_bytes(ring):
    status = ring.path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == RingShape.equal(3, 200, 3).total_bytes == ring.total_bytes
    assert status.st_blocks * 512 >= status.st_size


def test_a_file_system_that_is_too_full_refuses_the_ring_with_the_numbers(shared_memory):
    status = os.statvfs(shared_memory)
    too_much = status.f_bavail * status.f_frsize + PAGE_BYTES
    shape = RingShape.equal(1, too_much, 1)
    needed = rf"needs {shape.total_bytes} bytes and its file system has \d+ left"
    with pytest.raises(UserError, match=needed):
        RingFile.create(shared_memory / "own.ring", IDENTITY, OWNER, shape)
    assert list(shared_memory.iterdir()) == []


def test_a_file_system_that_fills_up_meanwhile_refuses_the_ring_too(shared_memory):
    """The limit on file sizes makes the reservation fail, as a full file system would."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * PAGE_BYTES, limits[1]))
    try:
        shape = RingShape.equal(10, PAGE_BYTES, 1)
        with pytest.raises(UserError, match=r"needs \d+ bytes and its file system has \d+ left"):
            RingFile.create(shared_memory / "own.ring", IDENTITY, OWNER, shape)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(shared_memory.iterdir()) == []


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (StoreIdentity("run-2", "0123abcd"), "its run id is run-1, this job's is run-2"),
        (StoreIdentity("run-1", "ffff"), "its fingerprint is 0123abcd, this job's is ffff"),
        (StoreIdentity("run-1", "0123abcd", 6), "its format version is 5, this job's is 6"),
    ],
)
def test_the_file_of_another_job_is_refused(ring, other, words):
    with pytest.raises(UserError, match=words) as refusal:
        RingFile.open(ring.path, other)
    assert str(ring.path) in str(refusal.value)
    assert "--moevement-store-dir" in str(refusal.value)
    assert "moevement clean --run-id run-1" in str(refusal.value)


def test_a_file_that_was_cut_is_damaged(ring):
    os.truncate(ring.path, ring.total_bytes - 1)
    with pytest.raises(DamagedFileError, match="it was made with"):
        reopened(ring)


def test_a_link_is_not_followed(ring):
    link = ring.path.with_name("link.ring")
    link.symlink_to(ring.path)
    with pytest.raises(UserError, match="can't open"):
        RingFile.open(link, IDENTITY)


def test_who_only_looks_writes_nothing(ring):
    fill(ring, 1, byte=1)
    looked_at = RingFile.open(ring.path, None, Access.READ)
    assert [record.step for record in looked_at.records()] == [1]
    with pytest.raises(TypeError):
        looked_at.buffer(1)[0] = 1


def test_a_record_that_does_not_fit_is_refused_before_anything_is_written(ring):
    held = fill(ring, 1, byte=1)
    parts = tuple(SlotPart("x" * 70 + str(each), 0, 1, 0) for each in range(4))
    with pytest.raises(ValueError, match="has room for slots of 3 parts, not of 4"):
        ring.publish(SlotRecord(0, Window(0, 2), 1, 1, 1, parts))
    with pytest.raises(ValueError, match="201 bytes in a room of 200"):
        ring.publish(SlotRecord(0, Window(0, 2), 1, 1, 201, ()))
    assert ring.records() == (held,)


@pytest.mark.parametrize(
    "changes",
    [
        {"step": 6},
        {"slot": 2},
        {"rollbacks": -1},
        {"rollbacks": 2**64},
        {"payload_bytes": 170},
        {"payload_bytes": True},
        {"parts": (SlotPart("a", 0, 1, 0), SlotPart("a", 1, 1, 0))},
    ],
)
def test_a_record_of_numbers_that_do_not_fit_together_is_none(ring, changes):
    record = fill(ring, 5, byte=1)
    with pytest.raises(MalformedRecordError):
        dataclasses.replace(record, **changes)


def test_a_record_survives_the_wire(ring):
    record = fill(ring, 5, byte=1)
    assert record_of_document(record_document(record)) == record


@pytest.mark.parametrize(
    "document",
    [None, 3, [], {}, {"window": 3}, {"parts": [["a", 0, 1]]}, {"era": "0"}, {"slot": 0.0}],
)
def test_a_document_that_is_no_record_is_refused(ring, document):
    if isinstance(document, dict) and document:
        document = record_document(fill(ring, 5, byte=1)) | document
    with pytest.raises(MalformedRecordError):
        record_of_document(document)


def test_no_flipped_byte_passes_for_what_was_written(shared_memory):
    """Flips every byte of a file, one at a time."""
    path = shared_memory / "own.ring"
    ring = RingFile.create(path, IDENTITY, OWNER, RingShape.equal(2, 200, 3))
    held = {step: fill(ring, step, byte=step) for step in (4, 5)}
    written = {
        (step, part.name): bytes(ring.payload(record)[part.offset : part.offset + part.size_bytes])
        for step, record in held.items()
        for part in record.parts
    }
    ring.close()
    whole = path.read_bytes()
    noticed = {"header": 0, "descriptor": 0, "payload": 0}
    with path.open("r+b") as file:
        for at, byte in enumerate(whole):
            os.pwrite(file.fileno(), bytes([byte ^ (1 + at % 255)]), at)
            noticed_as = what_is_noticed(path, held, written)
            os.pwrite(file.fileno(), bytes([byte]), at)
            if noticed_as is not None:
                noticed[noticed_as] += 1
    parts_bytes = sum(part.size_bytes for record in held.values() for part in record.parts)
    assert noticed["header"] == PAGE_BYTES
    assert noticed["payload"] == parts_bytes
    assert noticed["descriptor"] > 2 * 100
    assert what_is_noticed(path, held, written) is None


def what_is_noticed(path, held, written):
    """Returns where a damage is found; asserts that what passes as intact is what was written."""
    try:
        ring = RingFile.open(path, IDENTITY)
    except DamagedFileError:
        return "header"
    noticed = None
    records = ring.records()
    if len(records) < len(held):
        noticed = "descriptor"
    for record in records:
        assert record == held[record.step]
        damaged = ring.damaged_parts(record)
        if damaged:
            noticed = "payload"
        for part in record.parts:
            data = bytes(ring.payload(record)[part.offset : part.offset + part.size_bytes])
            assert (data == written[record.step, part.name]) == (part.name not in damaged)
    ring.close()
    return noticed


WRITER = """
import sys
from pathlib import Path
from megatron_moevement.runtime.slots.ring_file import RingFile
from tests.runtime.slots.conftest import IDENTITY, fill
ring = RingFile.open(Path(sys.argv[1]), IDENTITY)
step = 0
while True:
    if step == 101:
        print("ready", flush=True)
    fill(ring, step, byte=step % 256)
    step += 1
"""


@pytest.mark.distributed
def test_what_a_killed_writer_leaves_is_whole(ring):
    draw = random.Random(5)
    root = Path(__file__).parents[3]
    newest = 0
    for _ in range(25):
        command = [sys.executable, "-c", WRITER, str(ring.path)]
        with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE) as writer:
            assert writer.stdout.readline() == b"ready\n"
            time.sleep(draw.random() * 0.02)
            writer.send_signal(signal.SIGKILL)
        records = ring.records()
        assert len(records) >= ring.capacity - 1
        for record in records:
            newest = max(newest, record.step)
            payload = ring.payload(record)
            assert ring.damaged_parts(record) == ()
            assert payload[0] == record.step % 256
            assert payload[48] == record.step % 256
    assert newest >= 100
