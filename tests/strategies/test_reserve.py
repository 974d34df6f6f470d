# SPDX-License-Identifier: Apache-2.0
"""Memory that a process makes and pins while it waits for a rank."""

import dataclasses
import errno
import os
import threading

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.slots.nameless_file import NamelessFile
from megatron_moevement.runtime.slots.ring_file import RingFile, RingShape, SlotRecord
from megatron_moevement.runtime.slots.store_identity import StoreIdentity
from megatron_moevement.runtime.stores import store as store_module
from megatron_moevement.runtime.stores.store import RingRole, StoreDirectory
from megatron_moevement.runtime.upstream_log.log import UpstreamLog
from megatron_moevement.strategies.moevement.protection import reserve as module
from megatron_moevement.strategies.moevement.protection.reserve import (
    Reserve,
    Reserved,
    ReserveSizes,
    Room,
)
from tests.harness.kept_spare import await_made

RANK = LogicalRank()
SHAPE = RingShape.equal(capacity=3, buffer_bytes=5000, max_parts=2)
SIZES = ReserveSizes(SHAPE.total_bytes + 8192, 4 * 4096, copies=2)
PINNED_BYTES = SIZES.ring_bytes + SIZES.log_bytes


class Pins:
    """Counts what is pinned, and holds whoever pins a ring up until the gate is open."""

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.asked = threading.Event()
        self.sizes = {}

    def __call__(self, memory):
        self.asked.set()
        assert memory.nbytes != SIZES.ring_bytes or self.gate.wait(timeout=20)
        address = memory.data_ptr()
        self.sizes[address] = memory.nbytes
        return lambda: self.sizes.pop(address)

    @property
    def pinned_bytes(self):
        return sum(self.sizes.values())


def write(ring):
    """Writes a slot; returns its record."""
    ring.reserve(2)[:4] = b"slot"
    return ring.publish(SlotRecord(0, Window(2, 1), 0, 2, 4, ()))


@pytest.fixture
def pins():
    made = Pins()
    yield made
    assert made.sizes == {}


@pytest.fixture
def store(shared_memory, pins):
    with StoreDirectory(shared_memory, StoreIdentity("run", "0123"), 0) as opened:
        yield opened


def made(store, pins, room=None):
    """Returns a reserve with all that has room in it."""
    reserve = Reserve(store.folder, pins)
    reserve.make(SIZES, room or Room())
    await_made(reserve)
    for thread in threading.enumerate():
        if thread.name == "late-pin":
            thread.join()
    return reserve


def hand_over(store, taken):
    """Lets a store use what is made; returns what is meant for a log."""
    store.reserve, store.reserve_of_copies = taken.ring, list(taken.copies)
    return taken.log


def take(store, pins):
    """Lets a store use all of it; returns what is meant for a log."""
    return hand_over(store, made(store, pins).take())


def test_ring_and_log_lie_in_it_and_nothing_else_is_pinned(store, pins):
    memory = take(store, pins)
    assert pins.pinned_bytes == PINNED_BYTES
    assert {path.name for path in store.folder.iterdir()} == {"lock"}
    ring = store.ring(RingRole.OWN, RANK, SHAPE)
    ring.pin(lambda _: pytest.fail("pinned again"))
    log = UpstreamLog(max_steps=3, step_bytes=4096, pin=pins, reserve=memory)
    assert pins.pinned_bytes == PINNED_BYTES
    assert (store.reserve, ring.records()) == (None, ())
    record = write(ring)
    again = RingFile.open(ring.path, store.identity)
    assert bytes(again.payload(record)) == b"slot"
    assert again.shape == SHAPE
    again.close()
    log.close()
    store.drop_ring(RingRole.OWN, RANK)
    store.drop_reserve()


def test_what_is_too_small_is_not_used(store, pins):
    memory = take(store, pins)
    large = RingShape.equal(capacity=9, buffer_bytes=5000, max_parts=2)
    ring = store.ring(RingRole.OWN, RANK, large)
    assert not ring.is_pinned
    log = UpstreamLog(max_steps=5, step_bytes=4096, pin=pins, reserve=memory)
    assert pins.pinned_bytes == PINNED_BYTES + log.capacity_bytes
    memory.close()
    log.close()
    store.drop_reserve()


def test_a_ring_that_is_being_pinned_counts_as_space_and_is_used_and_nobody_waits(
    store, pins, monkeypatch
):
    pins.gate.clear()
    reserve = Reserve(store.folder, pins)
    reserve.make(SIZES, Room())
    await_made(reserve)
    memory = hand_over(store, reserve.take())
    assert pins.pinned_bytes == SIZES.log_bytes
    with monkeypatch.context() as patched:
        patched.setattr(store_module, "free_bytes", lambda folder: 0)
        store.check_space(3 * SHAPE.total_bytes)
    ring = store.ring(RingRole.OWN, RANK, SHAPE)
    ring.pin(lambda _: pytest.fail("pinned again"))
    ring.reserve(2)[:4] = b"slot"
    pins.gate.set()
    store.drop_ring(RingRole.OWN, RANK)  # waits until it is pinned, and unpins it
    assert pins.pinned_bytes == SIZES.log_bytes
    store.drop_reserve()
    memory.close()


def test_rings_of_copies_lie_in_it_and_nothing_of_them_is_allocated_again(store, pins, monkeypatch):
    memory = take(store, pins)
    allocated, fallocate = [], os.posix_fallocate
    monkeypatch.setattr(
        os, "posix_fallocate", lambda *sizes: (allocated.append(sizes), fallocate(*sizes))
    )
    rings = [store.ring(RingRole.HELD, LogicalRank(dp=dp), SHAPE) for dp in range(2)]
    assert allocated == []
    third = store.ring(RingRole.HELD, LogicalRank(dp=2), SHAPE)
    assert len(allocated) == 1
    for ring in (*rings, third):
        assert not ring.is_pinned  # no device copies there
        assert ring.records() == ()
        record = write(ring)
        again = RingFile.open(ring.path, store.identity)
        assert (bytes(again.payload(record)), again.shape) == (b"slot", SHAPE)
        again.close()
    assert store.reserve is not None  # for its own slots
    assert store.reserve_of_copies == []
    store.drop_reserve()
    memory.close()


def test_what_is_in_reserve_counts_as_space_that_is_left(store, pins, monkeypatch):
    announced_bytes = 3 * SHAPE.total_bytes
    memory = take(store, pins)
    monkeypatch.setattr(store_module, "free_bytes", lambda folder: 0)
    store.check_space(announced_bytes)
    store.drop_reserve()
    with pytest.raises(UserError):
        store.check_space(announced_bytes)
    memory.close()


@pytest.mark.parametrize(
    ("lacking_bytes", "copies"),
    [(0, 2), (1, 1), (SIZES.ring_bytes, 1), (SIZES.ring_bytes + 1, 0)],
)
def test_where_there_is_less_room_fewer_rings_of_copies_are_made_and_a_line_says_so(
    store, pins, monkeypatch, caplog, lacking_bytes, copies
):
    monkeypatch.setattr(module, "free_bytes", lambda folder: SIZES.total_bytes - lacking_bytes)
    taken = made(store, pins).take()
    assert len(taken.copies) == copies
    said = [record.getMessage() for record in caplog.records]
    short = f"{(2 - copies) * SIZES.ring_bytes} of {SIZES.total_bytes} bytes in reserve"
    assert [short in each for each in said] == [True] * (copies < 2)
    taken.close()


def test_what_is_spoken_for_is_left(store, pins, monkeypatch):
    monkeypatch.setattr(module, "free_bytes", lambda folder: SIZES.total_bytes)
    taken = made(store, pins, Room(awaited_bytes=SIZES.ring_bytes)).take()
    assert len(taken.copies) == 1
    taken.close()


def test_where_there_is_no_room_nothing_is_made_and_a_line_says_so_once(
    store, pins, monkeypatch, caplog
):
    monkeypatch.setattr(module, "free_bytes", lambda folder: SIZES.ring_bytes - 1)
    reserve = made(store, pins)
    reserve.make(SIZES, Room())
    assert reserve.take() == Reserved()
    assert not pins.asked.is_set()
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith(f"{store.folder} has no room for {SIZES.total_bytes} of ")


@pytest.mark.parametrize("first", [SIZES.ring_bytes - 1, PINNED_BYTES, SIZES.total_bytes - 1])
def test_what_lacks_is_made_once_there_is_room(store, pins, monkeypatch, first):
    real = module.free_bytes
    monkeypatch.setattr(module, "free_bytes", lambda folder: first)
    reserve = made(store, pins)
    before = reserve.total_bytes
    assert before <= first
    monkeypatch.setattr(module, "free_bytes", real)
    reserve.make(SIZES, Room(left_bytes=SIZES.total_bytes - 1))
    await_made(reserve)
    assert before <= reserve.total_bytes == SIZES.total_bytes - SIZES.ring_bytes
    reserve.make(SIZES, Room(left_bytes=SIZES.total_bytes))
    await_made(reserve)
    assert reserve.total_bytes == SIZES.total_bytes
    last = reserve.thread
    reserve.make(SIZES, Room())
    assert reserve.thread is last  # nothing lacks
    reserve.make(dataclasses.replace(SIZES, copies=1), Room())
    taken = reserve.take()
    assert len(taken.copies) == 1  # it keeps more for others than before
    taken.close()


@pytest.mark.parametrize(
    ("number", "tries"), [(errno.ENOSPC, 2), (errno.EOPNOTSUPP, 1)], ids=["full", "refused"]
)
def test_who_finds_it_full_after_all_tries_again_and_who_is_refused_does_not(
    store, pins, monkeypatch, caplog, number, tries
):
    asked = []

    def refuse(*sizes):
        asked.append(sizes)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    reserve = made(store, pins)
    reserve.make(SIZES, Room())
    await_made(reserve)
    assert len(asked) == tries
    assert reserve.take() == Reserved()
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.endswith(os.strerror(number))


class SlowCopies:
    """Makes files as `NamelessFile` does, those for copies when they may be made."""

    def __init__(self):
        self.asked, self.gate = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, folder, total_bytes, pin=None):
        if pin is None:
            self.asked.release()
            assert self.gate.acquire(timeout=20)
        return NamelessFile(folder, total_bytes, pin)


@pytest.fixture
def slow(monkeypatch):
    slow = SlowCopies()
    monkeypatch.setattr(module, "NamelessFile", slow)
    return slow


def test_a_rank_that_is_lost_early_finds_the_ring_at_work_and_no_more_are_made(store, pins, slow):
    reserve = Reserve(store.folder, pins)
    reserve.make(SIZES, Room())
    assert slow.asked.acquire(timeout=20)
    found = []
    taking = threading.Thread(target=lambda: found.append(reserve.take()))
    taking.start()
    taking.join(timeout=0.2)
    assert found == []  # what is allocated by then is no room for the rank
    slow.gate.release(2)
    taking.join(timeout=20)
    (taken,) = found
    assert (taken.ring.total_bytes, len(taken.copies)) == (SIZES.ring_bytes, 1)
    assert not slow.asked.acquire(blocking=False)
    assert reserve.take() == Reserved()
    taken.close()


def test_who_ends_early_waits_for_nothing_and_what_is_made_is_given_back(store, pins, slow):
    before = os.listdir("/proc/self/fd")
    reserve = Reserve(store.folder, pins)
    reserve.make(SIZES, Room())
    assert slow.asked.acquire(timeout=20)
    reserve.close()
    assert reserve.thread.is_alive()
    slow.gate.release(2)
    await_made(reserve)
    assert not slow.asked.acquire(blocking=False)
    assert os.listdir("/proc/self/fd") == before


def test_a_ring_is_there_where_a_log_can_not_be_pinned_and_nothing_is_tried_again(
    store, pins, caplog
):
    def pin(memory):
        if memory.nbytes == SIZES.log_bytes:
            raise UserError("no more may be locked")
        return pins(memory)

    before = os.listdir("/proc/self/fd")
    reserve = made(store, pin)
    last = reserve.thread
    reserve.make(SIZES, Room())
    assert reserve.thread is last
    assert "a log is not in reserve: no more may be locked" in caplog.text
    taken = reserve.take()
    assert (taken.total_bytes, taken.log, taken.copies) == (SIZES.ring_bytes, None, ())
    taken.close()
    assert os.listdir("/proc/self/fd") == before


def test_what_nobody_takes_is_given_back(store, pins):
    made(store, pins).close()
