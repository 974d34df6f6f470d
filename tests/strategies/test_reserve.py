"""Memory that a process makes and pins while it waits for a rank."""

import os
import threading

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.runtime.slots.nameless_file import NamelessFile
from megatron_moevement.runtime.slots.ring_file import RingFile, RingShape
from megatron_moevement.runtime.slots.store_identity import StoreIdentity
from megatron_moevement.runtime.stores import store as store_module
from megatron_moevement.runtime.stores.store import RingRole, StoreDirectory
from megatron_moevement.runtime.upstream_log.log import UpstreamLog
from megatron_moevement.strategies.moevement.protection import reserve as module
from megatron_moevement.strategies.moevement.protection.reserve import Reserve, ReserveSizes, Room

RANK = LogicalRank()
SHAPE = RingShape(capacity=3, buffer_bytes=5000, max_parts=2)
SIZES = ReserveSizes(SHAPE.total_bytes + 8192, 4 * 4096, copies=2)
PINNED_BYTES = SIZES.ring_bytes + SIZES.log_bytes


class Pins:
    """Counts what is pinned, and holds whoever pins up until the gate is open."""

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.asked = threading.Event()
        self.sizes = {}

    def __call__(self, memory):
        self.asked.set()
        assert self.gate.wait(timeout=20)
        address = memory.data_ptr()
        self.sizes[address] = memory.nbytes
        return lambda: self.sizes.pop(address)

    @property
    def pinned_bytes(self):
        return sum(self.sizes.values())


@pytest.fixture
def pins():
    made = Pins()
    yield made
    assert made.sizes == {}


@pytest.fixture
def store(shared_memory, pins):
    with StoreDirectory(shared_memory, StoreIdentity("run", "0123"), 0) as opened:
        yield opened


def made(store, pins):
    reserve = Reserve(store.folder, SIZES, pins, Room())
    reserve.thread.join()
    return reserve


def take(store, pins):
    """Lets a store use what is made; returns what is meant for a log."""
    taken = made(store, pins).take()
    store.reserve, store.reserve_of_copies = taken.ring, list(taken.copies)
    return taken.log


def test_ring_and_log_lie_in_it_and_nothing_else_is_pinned(store, pins):
    memory = take(store, pins)
    assert pins.pinned_bytes == PINNED_BYTES
    assert {path.name for path in store.folder.iterdir()} == {"lock"}
    ring = store.ring(RingRole.OWN, RANK, SHAPE)
    ring.pin(lambda _: pytest.fail("pinned again"))
    log = UpstreamLog(max_steps=3, step_bytes=4096, pin=pins, reserve=memory)
    assert pins.pinned_bytes == PINNED_BYTES
    assert (store.reserve, ring.records()) == (None, ())
    ring.buffer(2)[:4] = b"slot"
    again = RingFile.open(ring.path, store.identity)
    assert bytes(again.buffer(2)[:4]) == b"slot"
    assert again.shape == SHAPE
    again.close()
    log.close()
    store.drop_ring(RingRole.OWN, RANK)
    store.drop_reserve()


def test_what_is_too_small_is_not_used(store, pins):
    memory = take(store, pins)
    large = RingShape(capacity=9, buffer_bytes=5000, max_parts=2)
    ring = store.ring(RingRole.OWN, RANK, large)
    assert not ring.is_pinned
    log = UpstreamLog(max_steps=5, step_bytes=4096, pin=pins, reserve=memory)
    assert pins.pinned_bytes == PINNED_BYTES + log.capacity_bytes
    memory.close()
    log.close()
    store.drop_reserve()


def test_nobody_waits_for_what_is_not_made_yet_and_it_is_given_back(store, pins):
    pins.gate.clear()
    reserve = Reserve(store.folder, SIZES, pins, Room())
    assert pins.asked.wait(timeout=20)
    assert reserve.take() is None
    pins.gate.set()
    reserve.thread.join()
    assert reserve.take() is None


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
        ring.buffer(1)[:4] = b"slot"
        again = RingFile.open(ring.path, store.identity)
        assert (bytes(again.buffer(1)[:4]), again.shape) == (b"slot", SHAPE)
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


@pytest.mark.parametrize(("lacking_bytes", "copies"), [(0, 2), (1, 1), (SIZES.ring_bytes + 1, 0)])
def test_where_there_is_less_room_fewer_rings_of_copies_are_made_and_a_line_says_so(
    store, pins, monkeypatch, caplog, lacking_bytes, copies
):
    monkeypatch.setattr(module, "free_bytes", lambda folder: SIZES.total_bytes - lacking_bytes)
    taken = made(store, pins).take()
    assert len(taken.copies) == copies
    said = [record.getMessage() for record in caplog.records]
    assert [f"copies of {copies} of 2 ranks" in each for each in said] == [True] * (copies < 2)
    taken.close()


def test_what_is_spoken_for_is_left(store, pins, monkeypatch):
    monkeypatch.setattr(module, "free_bytes", lambda folder: SIZES.total_bytes)
    reserve = Reserve(store.folder, SIZES, pins, Room(awaited_bytes=SIZES.ring_bytes))
    reserve.thread.join()
    taken = reserve.take()
    assert len(taken.copies) == 1
    taken.close()


def test_where_there_is_no_room_nothing_is_made_and_a_line_says_so(
    store, pins, monkeypatch, caplog
):
    monkeypatch.setattr(module, "free_bytes", lambda folder: PINNED_BYTES - 1)
    assert made(store, pins).take() is None
    assert not pins.asked.is_set()
    (said,) = (record.getMessage() for record in caplog.records)
    assert f"{store.folder} has room for no memory of a rank in reserve" in said


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
    reserve = Reserve(store.folder, SIZES, pins, Room())
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
    assert reserve.take() is None
    taken.close()


def test_who_ends_early_waits_for_nothing_and_what_is_made_is_given_back(store, pins, slow):
    before = os.listdir("/proc/self/fd")
    reserve = Reserve(store.folder, SIZES, pins, Room())
    assert slow.asked.acquire(timeout=20)
    reserve.close()
    assert reserve.thread.is_alive()
    slow.gate.release(2)
    reserve.thread.join()
    assert not slow.asked.acquire(blocking=False)
    assert os.listdir("/proc/self/fd") == before


def test_a_ring_whose_log_can_not_be_pinned_is_given_back(store, pins, caplog):
    def pin(memory):
        if pins.pinned_bytes:
            raise UserError("no more may be locked")
        return pins(memory)

    before = os.listdir("/proc/self/fd")
    assert made(store, pin).take() is None
    assert "no memory is reserved for a rank: no more may be locked" in caplog.text
    assert os.listdir("/proc/self/fd") == before


def test_what_nobody_takes_is_given_back(store, pins):
    made(store, pins).close()
