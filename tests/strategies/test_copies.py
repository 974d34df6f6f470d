"""Copies of a rank's slots: complete with the last acknowledgement; who is silent is replaced."""

import contextlib
import socket
from datetime import timedelta

import pytest

from megatron_moevement.policy.placement import Host, Placement
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


def await_complete(copies, window):
    while not copies.acknowledgements.is_complete(window):
        copies.await_change()


@pytest.fixture
def holders(tmp_path):
    """Returns a function that starts a process that keeps copies: its server and its ring."""
    with contextlib.ExitStack() as stack:

        def start(process, *, room=True):
            ring = new_ring(tmp_path, f"held-{process}")
            stack.callback(ring.close)
            slots = StoredSlots(None)
            if room:
                slots.keep(ring)
            server = ReplicaServer(
                "127.0.0.1", Session(TOKEN, process, 1), slots, deadline=DEADLINE
            )
            return stack.enter_context(server), ring

        yield start


@pytest.fixture
def ring(tmp_path):
    made = new_ring(tmp_path, "own")
    yield made
    made.close()


@pytest.fixture
def copies_to(ring):
    """Returns a function that makes copies, first of all to processes 1 and 2, as they are told."""
    with contextlib.ExitStack() as stack:

        def make(addresses, first=(1, 2)):
            sender = SlotSender(Session(TOKEN, 0, 1), addresses, deadline=DEADLINE)
            placement = Placement({RANK: first}, len(first), len(first))
            known = [Host(0, "own", RANK)]
            known += [Host(each, f"domain {each}") for each in addresses]
            made = Copies(sender, ring, placement, known)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def holder(holders):
    return holders(1)


@pytest.fixture
def copies(copies_to, holder, unused_tcp_port):
    """Copies to process 1 and to process 2, of which nothing is left; there is nobody else."""
    return copies_to({1: holder[0].address, 2: ("127.0.0.1", unused_tcp_port)})


@pytest.fixture
def unused_tcp_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def test_a_silent_holder_is_given_up_and_the_window_is_complete_without_it(copies, ring, holder):
    window = Window(0, 2)
    copies.land(capture(ring, 0))
    copies.land(capture(ring, 1))
    assert copies.sent_bytes == 2 * 2 * SIZE_BYTES
    await_complete(copies, window)
    assert copies.acknowledgements.newest_complete() == window
    assert [record.step for record in holder[1].records()] == [0, 1]


def test_one_copy_of_each_slot_is_waited_for_and_the_others_go_on(copies_to, ring, holder):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        copies = copies_to({1: holder[0].address, 2: mute.getsockname()})
        copies.land(capture(ring, 0))
        copies.land(capture(ring, 1))
        copies.await_second_holder(Window(0, 2))
        assert [record.step for record in holder[1].records()] == [0, 1]
        assert copies.acknowledgements.owed_copies() == 2
        assert copies.holders == (1, 2)


def test_later_slots_go_to_those_who_are_left(copies, ring, holder):
    copies.land(capture(ring, 0))
    copies.land(capture(ring, 1))
    await_complete(copies, Window(0, 2))
    sent = copies.sent_bytes
    for step in (2, 3):
        record = capture(ring, step)
        copies.land(record)
        assert copies.sent_bytes == sent + (step - 1) * SIZE_BYTES
    await_complete(copies, Window(2, 2))
    assert [record.step for record in holder[1].records()] == [0, 1, 2, 3]


def test_with_nobody_left_a_slot_is_complete_when_it_has_landed(copies_to, ring, unused_tcp_port):
    copies = copies_to({2: ("127.0.0.1", unused_tcp_port)}, first=(2,))
    for step in range(4):
        copies.land(capture(ring, step))
        copies.await_change()
    assert copies.acknowledgements.newest_complete() == Window(2, 2)
    copies.drop_before(Window(2, 2))
    assert {key.window for key in copies.acknowledgements.owing} == {Window(2, 2)}


def test_another_process_takes_the_place_of_a_silent_one_with_all_that_it_kept(
    copies_to, ring, holders
):
    (here, kept), (there, taken_over) = holders(1), holders(3)
    copies = copies_to({1: here.address, 3: there.address}, first=(1,))
    copies.land(capture(ring, 0))
    while any(copies.acknowledgements.owing.values()):
        copies.await_change()
    assert ([record.step for record in kept.records()], copies.holders) == ([0], (1,))
    here.close()
    copies.land(capture(ring, 1))
    await_complete(copies, Window(0, 2))
    assert copies.holders == (3,)
    assert [record.step for record in taken_over.records()] == [0, 1]
    assert [taken_over.damaged_parts(record) for record in taken_over.records()] == [(), ()]
    copies.land_for(capture(ring, 2), [1])  # who shares slots knows only who was meant to have them
    copies.land(capture(ring, 3))
    await_complete(copies, Window(2, 2))
    assert [record.step for record in taken_over.records()] == [0, 1, 2, 3]


def test_who_has_no_room_for_what_it_is_to_take_over_is_passed_by(
    copies_to, ring, holders, unused_tcp_port
):
    (full, _), (there, taken_over) = holders(3, room=False), holders(4)
    copies = copies_to(
        {1: ("127.0.0.1", unused_tcp_port), 3: full.address, 4: there.address}, first=(1,)
    )
    copies.land(capture(ring, 0))
    copies.land(capture(ring, 1))
    await_complete(copies, Window(0, 2))
    assert copies.holders == (4,)
    assert [record.step for record in taken_over.records()] == [0, 1]


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
