# SPDX-License-Identifier: Apache-2.0
"""What the store's tests share: folders in shared memory, and small files of it."""

import contextlib
import dataclasses

import fsspec
import pytest

from megatron_moevement.policy.copies.journal_state import JournalState
from megatron_moevement.policy.job.guarantee import Computation, DeviceKind, Kernels
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.tiers.tier import TierName
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.policy.window.timetable import Timetable, TimetableEntry
from megatron_moevement.runtime.slots.ring_file import RingFile, RingShape
from megatron_moevement.runtime.slots.slot_record import EXTRAS, SlotPart, SlotRecord
from megatron_moevement.runtime.slots.store_identity import StoreIdentity
from megatron_moevement.runtime.tiers.part import Author, Told, WindowSlots
from megatron_moevement.runtime.tiers.target import open_target

IDENTITY = StoreIdentity("run-1", "0123abcd")
OWNER = LogicalRank(pp=1, ep=1)
WINDOW = Window(2, 2)
COMPUTATION = Computation(DeviceKind.CPU, Kernels.ANY, 3, {"model": "m"}, {"MKL_CBWR": "AVX2"})
STATE = JournalState(3, Timetable((TimetableEntry(0, 0, 2, "d"),)), 5, WINDOW, OWNER)


@pytest.fixture
def ring(shared_memory):
    """Returns a small ring in shared memory."""
    shape = RingShape.equal(capacity=3, buffer_bytes=200, max_parts=3)
    made = RingFile.create(shared_memory / "own.ring", IDENTITY, OWNER, shape)
    yield made
    made.close()


def fill(ring, step, byte, *, window=2):
    """Writes a slot of three parts into a ring, as a capture does; returns its record."""
    buffer = ring.reserve(step)
    parts = []
    for name, offset, size in (("layers.0.gate", 0, 40), ("head", 48, 100), (EXTRAS, 150, 21)):
        buffer[offset : offset + size] = bytes((byte + each) % 256 for each in range(size))
        parts.append(SlotPart.of(name, offset, buffer[offset : offset + size]))
    start, slot = step - step % window, step % window
    record = SlotRecord(0, Window(start, window), slot, step, 171, tuple(parts))
    return ring.publish(record)


@pytest.fixture(scope="module")
def served(request):
    """Begins an object store before the first test that may use one, where it is installed."""
    with contextlib.suppress(pytest.skip.Exception):
        request.getfixturevalue("object_store")


@pytest.fixture(params=["folder", "file", "memory", "s3"])
def target(request, tmp_path, served):
    """Returns a target of each kind."""
    if request.param == "folder":
        yield open_target(str(tmp_path / "tiers"), "run-1")
    elif request.param == "file":
        yield open_target(f"file://{tmp_path}/tiers", "run-1")
    elif request.param == "memory":
        yield open_target("memory://tiers", "run-1")
        fsspec.filesystem("memory").rm("/", recursive=True)
    else:
        system = request.getfixturevalue("object_store").system
        system.mkdir("tiers")
        yield open_target("s3://tiers/folder", "run-1")
        system.rm("tiers", recursive=True)


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
    return Told(
        dataclasses.replace(STATE, rank=owner),
        {4: b"{}", 5: b'{"a": 1}'},
        {"d": b"x"},
        Author(COMPUTATION, "host-1", "0123abcd"),
    )


def slots_of(ring, name=None, window=WINDOW):
    return WindowSlots(name or named(), window, ring)
