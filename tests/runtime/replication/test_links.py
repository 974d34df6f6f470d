# SPDX-License-Identifier: Apache-2.0
"""Slots and logs travel over links that are slow and lose bytes as they do over TCP."""

import time
from datetime import timedelta

import torch

from megatron_moevement.policy.job.boundary import BoundaryTag, Direction
from megatron_moevement.runtime.peers.connection import PeerConnection
from megatron_moevement.runtime.peers.log_reader import LogReader
from megatron_moevement.runtime.peers.sender import SilentPeerError
from megatron_moevement.runtime.peers.server import ReplicaServer
from megatron_moevement.runtime.upstream_log.log import UpstreamLog
from tests.harness.loopback_transport import Link, Loopback

from .conftest import DEADLINE, LARGE_SHAPE, capture, key_of

LATENCY = timedelta(milliseconds=5)
BAD = Link(bandwidth_bytes_per_s=200e6, latency=LATENCY, loss=0.02, seed=11)


def test_slots_are_sent_acknowledged_and_fetched_over_a_slow_link_with_loss(job):
    loopback = Loopback(BAD)
    owner, holder = job(2, shape=LARGE_SHAPE, transport=loopback)
    records = [capture(owner.ring, step, size_bytes=4 * 2**20) for step in (3, 4)]
    began_s = time.monotonic()
    with owner.sender(holder) as sender:
        for record in records:
            sender.land(owner.owner, record, owner.ring.payload(record), (1,))
        while sender.account.acknowledgements.owed_copies():
            assert sender.account.await_change(DEADLINE)
        assert sender.account.silent == {}
        into = memoryview(bytearray(LARGE_SHAPE.buffer_bytes))
        for record in records:
            assert sender.fetch(1, key_of(owner.owner, record), lambda _: into) == record
            assert into[: record.payload_bytes] == owner.ring.payload(record)
    assert holder.held[0].records() == tuple(records)
    assert [holder.held[0].damaged_parts(record) for record in records] == [(), ()]
    assert loopback.lost > 0
    # There and back: two for the proofs of each of three connections, and one for each slot.
    assert time.monotonic() - began_s >= 2 * (3 * 2 + 4) * LATENCY.total_seconds()


def test_a_copy_takes_as_long_as_its_size_needs_while_it_moves_on(job):
    loopback = Loopback(Link(bandwidth_bytes_per_s=2e6))
    owner, holder = job(2, shape=LARGE_SHAPE, transport=loopback)
    record = capture(owner.ring, 3, size_bytes=LARGE_SHAPE.buffer_bytes)
    began_s = time.monotonic()
    with owner.sender(holder, deadline=timedelta(seconds=2)) as sender:
        sender.send(owner.owner, record, owner.ring.payload(record), (1,))[1].result()
        assert sender.account.silent == {}
    assert time.monotonic() - began_s >= 4  # twice the deadline
    assert holder.held[0].records() == (record,)


def test_what_moved_before_a_link_broke_was_no_trouble(job, monkeypatch):
    """Silence counts from the last byte, or a large copy that is cut would cost its holder."""
    owner, holder = job(2)
    record = capture(owner.ring, 3)
    began_s, store = [], PeerConnection.store

    def stamped(*arguments, **others):
        began_s.append(time.monotonic())
        store(*arguments, **others)

    def cut(_):
        raise ConnectionResetError("cut")

    monkeypatch.setattr(PeerConnection, "store", stamped)
    with owner.sender(holder) as sender:
        sender._halfway = cut
        outcome = sender.send(owner.owner, record, owner.ring.payload(record), (1,))[1]
        assert isinstance(outcome.exception(), SilentPeerError)
        assert sender.account.troubles[1].since_s > began_s[0]


def test_a_copy_that_a_link_is_too_slow_for_makes_its_holder_silent(job):
    loopback = Loopback(Link(bandwidth_bytes_per_s=1e5))
    owner, holder = job(2, shape=LARGE_SHAPE, transport=loopback)
    record = capture(owner.ring, 3, size_bytes=LARGE_SHAPE.buffer_bytes)
    with owner.sender(holder, deadline=timedelta(milliseconds=300)) as sender:
        outcome = sender.send(owner.owner, record, owner.ring.payload(record), (1,))[1]
        assert isinstance(outcome.exception(), SilentPeerError)
        assert "deadline" in sender.account.silent[1]
    holder.server.close()
    assert holder.held[0].records() == ()


def test_logged_tensors_are_read_over_a_slow_link_with_loss(job):
    owner, holder = job(2, transport=Loopback(BAD))
    log = UpstreamLog(max_steps=1, step_bytes=2**20)
    log.begin_step(7)
    tags = [BoundaryTag(7, Direction.FORWARD, 0, 1, number) for number in range(4)]
    for number, tag in enumerate(tags):
        tensor = torch.arange(3000.0) + number
        place = log.reserve(tag, tensor)
        place.copy_(tensor)
        log.land(tag, place)
    log.end_step(7)
    with (
        ReplicaServer("127.0.0.1", holder.me, holder.slots, deadline=DEADLINE, log=log) as server,
        LogReader(owner.me, {1: server.address}, deadline=DEADLINE, step_bytes=2**20) as reader,
    ):
        reader.prefetch(1, tags)
        for number, tag in enumerate(tags):
            assert torch.equal(reader.take(1, tag), torch.arange(3000.0) + number)
        assert reader.received(1, 7) == {}
