"""Copies of a rank's slots: complete with the last acknowledgement, given up with who is silent."""

from datetime import timedelta

import pytest

from megatron_moevement.policy.ranks import LogicalRank
from megatron_moevement.policy.schedule import Window
from megatron_moevement.runtime.replication.handshake import Session
from megatron_moevement.runtime.replication.sender import SlotSender
from megatron_moevement.runtime.replication.server import ReplicaServer
from megatron_moevement.runtime.replication.stored_slots import StoredSlots
from megatron_moevement.runtime.slots.identity import StoreIdentity
from megatron_moevement.runtime.slots.ring_file import RingFile
from megatron_moevement.runtime.slots.slot_record import SlotPart, SlotRecord
from megatron_moevement.strategies.copies import Copies

pytestmark = pytest.mark.timeout(60)
TOKEN = b"a secret of this job"
DEADLINE = timedelta(seconds=20)
RANK = LogicalRank()
IDENTITY = StoreIdentity("run", "0123")
SIZE_BYTES = 60


def new_ring(folder, name):
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.ring"
    return RingFile.create(path, IDENTITY, RANK, capacity=5, buffer_bytes=100, max_parts=1)


def capture(ring, step):
    payload = ring.buffer(step)[:SIZE_BYTES]
    payload[:] = bytes([step]) * SIZE_BYTES
    record = SlotRecord(
        0,
        Window(step - step % 2, 2),
        step % 2,
        step,
        SIZE_BYTES,
        (SlotPart.of("head", 0, payload),),
    )
    ring.publish(record)
    return record


@pytest.fixture
def holder(tmp_path):
    """Process 1, which keeps copies: its server and its ring."""
    ring = new_ring(tmp_path, "held")
    slots = StoredSlots(None)
    slots.keep(ring)
    me = Session(TOKEN, 1, 1)
    with ReplicaServer("127.0.0.1", me, slots, deadline=DEADLINE) as server:
        yield server, ring
    ring.close()


@pytest.fixture
def ring(tmp_path):
    made = new_ring(tmp_path, "own")
    yield made
    made.close()


@pytest.fixture
def copies(ring, holder, unused_tcp_port):
    """Copies to process 1 and to process 2, of which nothing is left."""
    server, _ = holder
    addresses = {1: server.address, 2: ("127.0.0.1", unused_tcp_port)}
    made = Copies(SlotSender(Session(TOKEN, 0, 1), addresses, deadline=DEADLINE), ring, (1, 2))
    yield made
    made.close()


@pytest.fixture
def unused_tcp_port():
    import socket  # noqa: PLC0415

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def test_a_silent_holder_is_given_up_and_the_window_is_complete_without_it(copies, ring, holder):
    window = Window(0, 2)
    copies.land(capture(ring, 0))
    copies.land(capture(ring, 1))
    assert copies.sent_bytes == 2 * 2 * SIZE_BYTES
    copies.await_complete(window)
    assert copies.acknowledgements.newest_complete() == window
    assert [record.step for record in holder[1].records()] == [0, 1]


def test_later_slots_go_to_those_who_are_left(copies, ring, holder):
    copies.land(capture(ring, 0))
    copies.land(capture(ring, 1))
    copies.await_complete(Window(0, 2))
    sent = copies.sent_bytes
    for step in (2, 3):
        record = capture(ring, step)
        copies.land(record)
        assert copies.sent_bytes == sent + (step - 1) * SIZE_BYTES
    copies.await_complete(Window(2, 2))
    assert [record.step for record in holder[1].records()] == [0, 1, 2, 3]


def test_with_nobody_left_a_slot_is_complete_when_it_has_landed(ring, unused_tcp_port):
    sender = SlotSender(
        Session(TOKEN, 0, 1), {2: ("127.0.0.1", unused_tcp_port)}, deadline=DEADLINE
    )
    copies = Copies(sender, ring, (2,))
    for step in range(4):
        copies.land(capture(ring, step))
        copies.await_change()
    assert copies.acknowledgements.newest_complete() == Window(2, 2)
    copies.drop_before(Window(2, 2))
    assert {key.window for key in copies.acknowledgements.owing} == {Window(2, 2)}
    copies.close()


def test_a_slot_that_this_rank_has_lost_comes_back(copies, ring, holder):
    record = capture(ring, 3)
    copies.land_for(record, [1])
    while any(copies.acknowledgements.owing.values()):
        copies.await_change()
    payload = bytes(ring.payload(record))
    ring.buffer(3)[:SIZE_BYTES] = bytes(SIZE_BYTES)
    ring.invalidate(3)
    copies.fetch(1, record.window, record.slot)
    assert ring.record(3) == record
    assert bytes(ring.payload(record)) == payload
