# SPDX-License-Identifier: Apache-2.0
"""Slots travel to their holders and back, whole or not at all."""

import os
import re
import socket
import threading
import tracemalloc
from concurrent.futures import wait
from datetime import timedelta

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.peers.sender import (
    DamagedError,
    FetchError,
    SilentPeerError,
    SlotSender,
)
from megatron_moevement.runtime.peers.server import ReplicaServer
from megatron_moevement.runtime.priority import BACKGROUND_NICE
from megatron_moevement.runtime.slots.ring_file import RingShape

from .conftest import DEADLINE, SHAPE, W, capture, key_of


def await_acknowledgements(sender):
    """Waits until nobody owes an acknowledgement; returns how often something changed."""
    changes = 0
    while any(sender.account.acknowledgements.owing.values()):
        assert sender.account.await_change(DEADLINE), sender.account.silent
        changes += 1
    return changes


def test_a_landed_slot_is_held_by_all_its_holders_and_acknowledged(job):
    owner, first, second = job(3)
    with owner.sender(first, second) as sender:
        record = capture(owner.ring, 3)
        sender.land(owner.owner, record, owner.ring.payload(record), (1, 2))
        await_acknowledgements(sender)
        assert sender.account.acknowledgements.owing == {key_of(owner.owner, record): frozenset()}
        for holder in (first, second):
            copies = holder.held[0]
            assert copies.records() == (record,)
            assert copies.damaged_parts(record) == ()
            assert copies.payload(record) == owner.ring.payload(record)
            assert holder.arrived == [key_of(owner.owner, record)]
        assert sender.account.silent == {}


def test_threads_that_carry_copies_leave_cores_to_training(job):
    owner, holder = job(2)
    with owner.sender(holder) as sender:
        record = capture(owner.ring, 3)
        sender.land(owner.owner, record, owner.ring.payload(record), (1,))
        await_acknowledgements(sender)
        carrying = [
            thread.native_id
            for thread in threading.enumerate()
            if re.fullmatch(r"(slot-sender|replica-server) [0-9]+", thread.name)
        ]
        assert len(carrying) >= 2
        for thread in carrying:
            assert os.getpriority(os.PRIO_PROCESS, thread) >= BACKGROUND_NICE
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < BACKGROUND_NICE


def test_a_window_is_complete_with_the_last_acknowledgement_of_its_last_slot(job):
    owner, holder = job(2)
    with owner.sender(holder) as sender:
        for step in range(3, 3 + W):
            assert sender.account.acknowledgements.newest_complete() is None
            record = capture(owner.ring, step)
            sender.land(owner.owner, record, owner.ring.payload(record), (1,))
            await_acknowledgements(sender)
        assert sender.account.acknowledgements.newest_complete() == Window(3, W)


def test_a_slot_that_nobody_is_to_keep_is_complete_at_once(job):
    (owner,) = job(1)
    with owner.sender() as sender:
        record = capture(owner.ring, 3)
        sender.land(owner.owner, record, owner.ring.payload(record), ())
        assert sender.account.acknowledgements.owing == {key_of(owner.owner, record): frozenset()}


def test_many_owners_stream_to_each_other_at_once(job):
    processes = job(4)
    everybody = range(4)

    def stream(process):
        others = [other for other in processes if other is not process]
        with process.sender(*others) as sender:
            for step in range(40):
                record = capture(process.ring, step, size_bytes=4000 + step)
                holders = [other.me.process for other in others]
                sender.land(process.owner, record, process.ring.payload(record), holders)
                if step % W == W - 1:
                    await_acknowledgements(sender)
            await_acknowledgements(sender)
            complete.append(sender.account.acknowledgements.newest_complete())

    complete = []
    threads = [threading.Thread(target=stream, args=(each,)) for each in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert complete == [Window(36, W)] * 4
    for process in processes:
        for other in everybody:
            if other == process.me.process:
                continue
            copies = process.held[other]
            assert copies.records() == processes[other].ring.records()
            assert [record.step for record in copies.records()] == list(range(34, 40))
            assert all(copies.damaged_parts(record) == () for record in copies.records())


@pytest.mark.parametrize("whose", ["its own", "a copy"])
def test_a_slot_is_fetched_from_whoever_holds_it(job, whose):
    owner, holder, newcomer = job(3)
    record = capture(owner.ring, 4)
    with owner.sender(holder) as sender:
        sender.land(owner.owner, record, owner.ring.payload(record), (1,))
        await_acknowledgements(sender)
    source = owner if whose == "its own" else holder
    with newcomer.sender(source) as sender:
        into, key = memoryview(bytearray(SHAPE.buffer_bytes)), key_of(owner.owner, record)
        found = sender.fetch(source.me.process, key, lambda _: into)
    assert found == record
    assert into[: record.payload_bytes] == owner.ring.payload(record)


def test_what_a_peer_does_not_hold_is_not_fetched(job):
    owner, newcomer = job(2)
    record = capture(owner.ring, 4)
    into = memoryview(bytearray(SHAPE.buffer_bytes))
    with newcomer.sender(owner) as sender:
        for rank, window, slot in (
            (LogicalRank(tp=1), record.window, record.slot),
            (owner.owner, Window(3, W, 1), record.slot),
            (owner.owner, Window(4, W), 0),
            (owner.owner, record.window, record.slot + 1),
        ):
            with pytest.raises(FetchError, match=r"process 0 does not hold slot"):
                sender.fetch(0, SlotKey(rank, window, slot), lambda _: into)
        with pytest.raises(FetchError, match="there is room for 10"):
            sender.fetch(0, key_of(owner.owner, record), lambda _: into[:10])
        sender.fetch(0, key_of(owner.owner, record), lambda _: into)


def test_no_damaged_part_of_a_held_slot_is_given_and_its_ring_is_doubted(job):
    owner, newcomer = job(2)
    record = capture(owner.ring, 4)
    into = memoryview(bytearray(SHAPE.buffer_bytes))
    payload = owner.ring.payload(record)
    with newcomer.sender(owner) as sender:
        for part in record.parts:
            owner.ring.is_doubted = False
            payload[part.offset] ^= 1
            with pytest.raises(FetchError, match=f"process 0 has it damaged: {part.name}"):
                sender.fetch(0, key_of(owner.owner, record), lambda _: into)
            assert owner.ring.is_doubted
            payload[part.offset] ^= 1
        sender.fetch(0, key_of(owner.owner, record), lambda _: into)


def test_a_slot_that_is_damaged_at_home_is_reported_and_kept_nowhere(job):
    owner, holder = job(2)
    damaged, good = capture(owner.ring, 3), capture(owner.ring, 4)
    owner.ring.payload(damaged)[1] ^= 1
    with owner.sender(holder) as sender:
        sender.account.update(lambda known: known.landed(key_of(owner.owner, damaged), (1,)))
        outcomes = [
            sender.send(owner.owner, record, owner.ring.payload(record), (1,))[1]
            for record in (damaged, good)
        ]
        wait(outcomes)
        assert isinstance(outcomes[0].exception(), DamagedError)
        assert outcomes[1].result() is None
        assert sender.account.damaged == {key_of(owner.owner, damaged)}
        assert sender.account.silent == {}
    assert holder.held[0].records() == (good,)


def test_a_copy_replaces_the_older_one_in_its_buffer(job):
    owner, holder = job(2)
    with owner.sender(holder) as sender:
        for step in (3, 3 + SHAPE.capacity):
            record = capture(owner.ring, step)
            sender.land(owner.owner, record, owner.ring.payload(record), (1,))
            await_acknowledgements(sender)
            assert holder.held[0].records() == (record,)


def test_who_has_no_room_for_an_owner_refuses_and_is_silent_from_then_on(job):
    owner, holder = job(2)
    record = capture(owner.ring, 3)
    payload = owner.ring.payload(record)
    with owner.sender(holder) as sender:
        stranger = LogicalRank(tp=3)
        refused = sender.send(stranger, record, payload, (1,))[1]
        assert isinstance(refused.exception(), SilentPeerError)
        assert "no room for slots of pp0.dp0.tp3.cp0.ep0" in sender.account.silent[1]
        again = sender.send(owner.owner, record, payload, (1,))[1]
        assert isinstance(again.exception(), SilentPeerError)
        sender.set_address(1, holder.server.address)
        assert sender.account.silent == {}
        assert sender.send(owner.owner, record, payload, (1,))[1].result() is None


def test_a_slot_that_is_larger_than_the_buffers_of_the_holder_is_refused(job):
    (owner,) = job(1, shape=RingShape.equal(6, 20_000, 3))
    (holder,) = job(1)
    record = capture(owner.ring, 3, size_bytes=20_000)
    with owner.sender(holder) as sender:
        outcome = sender.send(owner.owner, record, owner.ring.payload(record), (1,))[1]
        assert isinstance(outcome.exception(), SilentPeerError)


def test_nothing_but_the_ring_holds_the_bytes_of_a_transfer(job):
    size_bytes = 32 * 2**20
    owner, holder = job(2, shape=RingShape.equal(2, size_bytes, 3))
    record = capture(owner.ring, 3, size_bytes=size_bytes)
    with owner.sender(holder) as sender:
        tracemalloc.start()
        try:
            for _ in range(3):
                outcome = sender.send(owner.owner, record, owner.ring.payload(record), (1,))[1]
                outcome.result(timeout=DEADLINE.total_seconds())
            assert holder.held[0].payload(record) == owner.ring.payload(record)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak_bytes < 2**20


def test_waiting_for_a_change_sees_what_came_before_and_ends_without_one(job):
    owner, holder = job(2)
    record = capture(owner.ring, 3)
    with owner.sender(holder) as sender:
        sender.send(owner.owner, record, owner.ring.payload(record), (1,))[1].result()
        assert sender.account.await_change(DEADLINE)
        assert not sender.account.await_change(timedelta(milliseconds=20))


@pytest.mark.parametrize(
    ("interface", "words"),
    [
        ("0.0.0.0", "is every interface"),
        ("::", "is every interface"),
        ("no-such-host.invalid", "can't be resolved"),
        ("203.0.113.7", "no address of this machine"),
    ],
)
def test_the_server_listens_on_one_interface_of_this_machine_only(job, interface, words):
    (process,) = job(1)
    with pytest.raises(UserError, match=f"--moevement-replication-interface .*{words}"):
        ReplicaServer(interface, process.me, process.slots, deadline=DEADLINE)
    assert process.server.address[0] == "127.0.0.1"


def test_the_server_can_be_told_a_host_name(job):
    (process,) = job(1)
    with ReplicaServer("localhost", process.me, process.slots, deadline=DEADLINE) as server:
        assert server.address[0] in ("127.0.0.1", "::1")


def test_copies_arrive_at_the_interface_that_is_named_and_at_no_other_one(job):
    owner, holder = job(2)
    record = capture(owner.ring, 3)
    with ReplicaServer("127.0.0.2", holder.me, holder.slots, deadline=DEADLINE) as server:
        assert server.address[0] == "127.0.0.2"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.address[1])).close()
        with SlotSender(owner.me, {1: server.address}, deadline=DEADLINE) as sender:
            sender.send(owner.owner, record, owner.ring.payload(record), (1,))[1].result()
    assert holder.held[0].payload(record) == owner.ring.payload(record)
