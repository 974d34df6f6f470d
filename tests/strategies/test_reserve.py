"""Memory that a process makes and pins while it waits for a rank."""

import threading

import pytest

from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.runtime.slots.ring_file import RingFile, RingShape
from megatron_moevement.runtime.slots.store_identity import StoreIdentity
from megatron_moevement.runtime.stores.store import RingRole, StoreDirectory
from megatron_moevement.runtime.upstream_log.log import UpstreamLog
from megatron_moevement.strategies.moevement.protection import reserve as module
from megatron_moevement.strategies.moevement.protection.reserve import Reserve, ReserveSizes

RANK = LogicalRank()
SHAPE = RingShape(capacity=3, buffer_bytes=5000, max_parts=2)
SIZES = ReserveSizes(SHAPE.total_bytes + 8192, 4 * 4096)


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
    reserve = Reserve(store.folder, SIZES, pins)
    reserve.thread.join()
    return reserve


def test_ring_and_log_lie_in_it_and_nothing_else_is_pinned(store, pins):
    store.reserve, memory = made(store, pins).take()
    assert pins.pinned_bytes == SIZES.total_bytes
    assert {path.name for path in store.folder.iterdir()} == {"lock"}
    ring = store.ring(RingRole.OWN, RANK, SHAPE)
    ring.pin(lambda _: pytest.fail("pinned again"))
    log = UpstreamLog(max_steps=3, step_bytes=4096, pin=pins, reserve=memory)
    assert pins.pinned_bytes == SIZES.total_bytes
    assert (store.reserve, ring.records()) == (None, ())
    ring.buffer(2)[:4] = b"slot"
    again = RingFile.open(ring.path, store.identity)
    assert bytes(again.buffer(2)[:4]) == b"slot"
    assert again.shape == SHAPE
    again.close()
    log.close()
    store.drop_ring(RingRole.OWN, RANK)


def test_what_is_too_small_is_not_used(store, pins):
    store.reserve, memory = made(store, pins).take()
    large = RingShape(capacity=9, buffer_bytes=5000, max_parts=2)
    ring = store.ring(RingRole.OWN, RANK, large)
    assert not ring.is_pinned
    log = UpstreamLog(max_steps=5, step_bytes=4096, pin=pins, reserve=memory)
    assert pins.pinned_bytes == SIZES.total_bytes + log.capacity_bytes
    memory.close()
    log.close()
    store.drop_reserve()


def test_nobody_waits_for_what_is_not_made_yet_and_it_is_given_back(store, pins):
    pins.gate.clear()
    reserve = Reserve(store.folder, SIZES, pins)
    assert pins.asked.wait(timeout=20)
    assert reserve.take() == (None, None)
    pins.gate.set()
    reserve.thread.join()
    assert reserve.take() == (None, None)


def test_a_copy_is_not_kept_in_it(store, pins):
    store.reserve, memory = made(store, pins).take()
    assert not store.ring(RingRole.HELD, RANK, SHAPE).is_pinned
    assert store.reserve is not None
    memory.close()


def test_where_there_is_no_room_nothing_is_made(store, pins, monkeypatch):
    monkeypatch.setattr(module, "free_bytes", lambda folder: SIZES.total_bytes - 1)
    assert made(store, pins).take() == (None, None)
    assert not pins.asked.is_set()


def test_what_nobody_takes_is_given_back(store, pins):
    made(store, pins).close()
