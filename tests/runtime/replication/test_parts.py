# SPDX-License-Identifier: Apache-2.0
"""A large slot goes to its holder, and comes back, in parts over several connections at a time."""

import contextlib
import dataclasses
import sys
import threading
import time

import pytest

from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.runtime.peers import peer_threads as threads_module
from megatron_moevement.runtime.peers import server as server_module
from megatron_moevement.runtime.peers.connection import PeerConnection
from megatron_moevement.runtime.peers.sender import DamagedError, FetchError, SilentPeerError
from megatron_moevement.runtime.peers.slot_messages import Share
from megatron_moevement.runtime.slots.arrivals import Arrivals
from megatron_moevement.runtime.slots.ring_file import RingShape
from megatron_moevement.runtime.slots.slot_record import SlotRecord
from megatron_moevement.runtime.transport.handshake import RefusedError
from megatron_moevement.runtime.transport.transport import Deadline
from tests.harness.loopback_transport import Link, Loopback

from .conftest import DEADLINE, LARGE_SHAPE, SHAPE, capture, interrupted_once, key_of

SIZE_BYTES = LARGE_SHAPE.buffer_bytes - 5
CONNECTIONS = 4


class Breaking(Loopback):
    """Breaks one of its connections once it has carried so many pieces.

    So many connections wait for each other before their first parts, so that none has two. Whoever
    fetches asks over the first connection what there is, before any part.
    """

    def __init__(self, link=None, *, broken=None, after=2, together=CONNECTIONS, fetches=False):
        super().__init__(link)
        self.dialed, self._broken, self._after, self._fetches = 0, broken, after, fetches
        self._dialing, self._requests = threading.Lock(), threading.Barrier(together)

    def dial(self, *arguments):
        connection = super().dial(*arguments)
        with self._dialing:
            self.dialed += 1
            is_broken = self.dialed == self._broken
            asks = self._fetches and self.dialed % CONNECTIONS == 1
        send, sent = connection.send, []

        def send_or_break_off(data, deadline):
            sent.append(len(data))
            first = 4 if asks else 3  # two of the handshake, and one that announces
            if len(sent) == first:
                self._requests.wait(DEADLINE.total_seconds())
            if is_broken and len(sent) > first + self._after:
                connection.shut_down()
            send(data, deadline)

        connection.send = send_or_break_off
        return connection


@pytest.fixture(autouse=True)
def _parts(monkeypatch):
    monkeypatch.setattr(threads_module, "LEAST_PART_BYTES", 2**20)


@pytest.fixture
def proved(monkeypatch):
    """Counts the callers that have proved to a server who they are."""
    callers, answer_call = [], server_module.answer_call

    def counted(channel, me, deadline, admit):
        answer_call(
            channel, me, deadline, lambda process: (admit(process), callers.append(process))
        )

    monkeypatch.setattr(server_module, "answer_call", counted)
    return callers


def part_threads():
    return [each.name for each in threading.enumerate() if each.name.startswith("slot-part")]


def sent(sender, owner, record):
    return sender.send(owner.owner, record, owner.ring.payload(record), (1,))[1]


def test_a_large_slot_arrives_over_several_connections_that_are_all_proved(job, proved):
    transport = Breaking()
    owner, holder = job(2, shape=LARGE_SHAPE, transport=transport)
    records = [capture(owner.ring, step, size_bytes=SIZE_BYTES) for step in (3, 4)]
    with owner.sender(holder) as sender:
        for record in records:
            sent(sender, owner, record).result()
    assert proved == [0] * CONNECTIONS == [0] * transport.dialed
    assert holder.held[0].records() == tuple(records)
    assert [holder.held[0].damaged_parts(record) for record in records] == [(), ()]
    assert len(holder.arrived) == 2


@pytest.fixture
def hasty():
    """Has threads take turns as often as they can."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)


def test_parts_that_come_at_once_make_room_one_after_the_other(job, monkeypatch, hasty):
    monkeypatch.setattr(threads_module, "LEAST_PART_BYTES", 2**10)
    owner, holder = job(2, shape=RingShape.equal(7, 2**14, 3))
    with owner.sender(holder) as sender:
        for step in range(3, 153):
            record = capture(owner.ring, step, size_bytes=2**14)
            assert sent(sender, owner, record).exception() is None
            assert holder.held[0].record(step) == record


def test_a_small_slot_takes_one_connection(job, proved):
    owner, holder = job(2)
    with owner.sender(holder) as sender:
        sent(sender, owner, capture(owner.ring, 3)).result()
    assert proved == [0]


@pytest.mark.parametrize("broken", [1, 2, 3, 4])
def test_a_slot_of_which_a_part_is_missing_is_never_held(job, broken):
    transport = Breaking(broken=broken)
    owner, holder = job(2, shape=LARGE_SHAPE, transport=transport)
    record = capture(owner.ring, 3, size_bytes=SIZE_BYTES)
    with owner.sender(holder) as sender:
        failure = sent(sender, owner, record).exception()
        assert isinstance(failure, SilentPeerError)
        assert holder.held[0].records() == ()
        sender.try_again(1)
        assert transport.dialed == CONNECTIONS
        sent(sender, owner, record).result()
    assert transport.dialed == 2 * CONNECTIONS
    assert holder.held[0].records() == (record,)
    assert holder.held[0].damaged_parts(record) == ()


def test_closing_ends_all_parts_of_a_transfer(job):
    transport = Breaking(Link(bandwidth_bytes_per_s=1e5), together=1)
    owner, holder = job(2, shape=LARGE_SHAPE, transport=transport)
    with owner.sender(holder) as sender:
        outcome = sent(sender, owner, capture(owner.ring, 3, size_bytes=SIZE_BYTES))
        while transport.dialed < CONNECTIONS:
            time.sleep(0.01)
    assert outcome.cancelled()
    assert sender.account.silent == {}
    holder.server.close()
    assert holder.held[0].records() == ()


@pytest.mark.parametrize("size_bytes", [SIZE_BYTES, 3 * 2**20, LARGE_SHAPE.buffer_bytes])
def test_a_large_slot_is_fetched_over_several_connections_that_are_all_proved(
    job, proved, size_bytes
):
    parts = min(size_bytes // 2**20, CONNECTIONS)
    transport = Breaking(Link(bandwidth_bytes_per_s=20e6), together=parts, fetches=True)
    owner, newcomer = job(2, shape=LARGE_SHAPE, transport=transport)
    record = capture(owner.ring, 3, size_bytes=size_bytes)
    into = memoryview(bytearray(LARGE_SHAPE.buffer_bytes))
    with newcomer.sender(owner) as sender:
        assert sender.fetch(0, key_of(owner.owner, record), lambda _: into) == record
    assert into[:size_bytes] == owner.ring.payload(record)
    # What there is was asked over one more, which may bring a part, too.
    assert proved == [1] * min(parts + 1, CONNECTIONS) == [1] * transport.dialed


@pytest.mark.parametrize("broken", [1, 2, 3, 4])
def test_a_fetch_of_which_a_part_is_missing_fails_and_another_one_does_not(job, broken):
    transport = Breaking(broken=broken, after=-1, fetches=True)
    owner, newcomer = job(2, shape=LARGE_SHAPE, transport=transport)
    record = capture(owner.ring, 3, size_bytes=SIZE_BYTES)
    into = memoryview(bytearray(LARGE_SHAPE.buffer_bytes))
    with newcomer.sender(owner) as sender:
        with pytest.raises(FetchError, match="can't be had from process 0"):
            sender.fetch(0, key_of(owner.owner, record), lambda _: into)
        assert part_threads() == []
        assert sender.fetch(0, key_of(owner.owner, record), lambda _: into) == record
    assert into[:SIZE_BYTES] == owner.ring.payload(record)


def test_parts_of_two_slots_make_none(job, monkeypatch):
    owner, newcomer = job(2, shape=LARGE_SHAPE)
    record = capture(owner.ring, 3, size_bytes=SIZE_BYTES)
    other = dataclasses.replace(record, rollbacks=1)
    find, found = owner.slots.find, [record, record, other]
    monkeypatch.setattr(
        owner.slots, "find", lambda key: (find(key)[0], found.pop() if found else record)
    )
    into = memoryview(bytearray(LARGE_SHAPE.buffer_bytes))
    with (
        newcomer.sender(owner) as sender,
        pytest.raises(FetchError, match="another slot in its place"),
    ):
        sender.fetch(0, key_of(owner.owner, record), lambda _: into)


def test_bytes_that_are_damaged_on_the_way_of_any_part_are_found(job, monkeypatch):
    owner, newcomer = job(2, shape=LARGE_SHAPE)
    record = capture(owner.ring, 3, size_bytes=SIZE_BYTES)
    monkeypatch.setattr(SlotRecord, "damaged_parts", lambda record, payload: ())
    owner.ring.payload(record)[SIZE_BYTES // 2 - 5] ^= 1  # in the part that is the third
    into = memoryview(bytearray(LARGE_SHAPE.buffer_bytes))
    with newcomer.sender(owner) as sender:
        sender.fetch(0, key_of(owner.owner, record), lambda _: into)
        monkeypatch.undo()
        monkeypatch.setattr(threads_module, "LEAST_PART_BYTES", 2**20)
        monkeypatch.setattr(owner.ring, "damaged_parts", lambda record: ())
        with pytest.raises(FetchError, match="head and 0 more parts are damaged"):
            sender.fetch(0, key_of(owner.owner, record), lambda _: into)


def test_a_fetch_that_is_interrupted_leaves_no_thread_that_writes(job):
    transport = Breaking(Link(bandwidth_bytes_per_s=1e5), together=1)
    owner, newcomer = job(2, shape=LARGE_SHAPE, transport=transport)
    record = capture(owner.ring, 3, size_bytes=SIZE_BYTES)
    into = memoryview(bytearray(LARGE_SHAPE.buffer_bytes))
    with newcomer.sender(owner) as sender:
        with interrupted_once(lambda: transport.dialed == CONNECTIONS):
            sender.fetch(0, key_of(owner.owner, record), lambda _: into)
        assert part_threads() == []


def test_one_transfer_at_a_time_writes_what_a_rank_owns():
    arrivals, one, other = Arrivals(), LogicalRank(), LogicalRank(dp=1)
    order = []

    def take(name):
        with arrivals.taking(one, name):
            order.append(name)

    with arrivals.taking(one, 1), arrivals.taking(one, 1), arrivals.taking(other, 2):
        waiting = threading.Thread(target=take, args=(2,))
        waiting.start()
        waiting.join(0.05)
        order.append(1)
    waiting.join(DEADLINE.total_seconds())
    assert order == [1, 2]


@pytest.mark.parametrize("step", [3, 3 + SHAPE.capacity], ids=["the same slot", "a newer one"])
@pytest.mark.parametrize("is_last", [False, True])
def test_what_a_transfer_brings_that_was_given_up_takes_the_room_of_nothing(job, step, is_last):
    """Its sender has sent another one since; a thread of the server reads it late."""
    owner, holder = job(2)
    record = capture(owner.ring, 3)
    payload = memoryview(bytes(owner.ring.payload(record)))
    given_up = dataclasses.replace(Share.whole(), is_last=is_last)
    with (
        owner.sender(holder) as sender,
        PeerConnection(owner.me, 1, holder.server.address, Deadline(DEADLINE)) as late,
    ):
        newer = record if step == 3 else capture(owner.ring, step)
        sent = sender.send(owner.owner, newer, owner.ring.payload(newer), (1,))
        assert sent[1].result(DEADLINE.total_seconds()) is None
        data = payload if is_last else payload[:100]
        with contextlib.suppress(RefusedError):
            late.store(owner.owner, record, data, Deadline(DEADLINE), share=given_up)
    assert [found.step for found in holder.held[0].records()] == [step]
    assert holder.held[0].damaged_parts(newer) == ()


def test_a_part_that_comes_again_with_other_bytes_is_not_intact(job):
    owner, holder = job(2)
    record = capture(owner.ring, 3)
    payload = owner.ring.payload(record)
    share = dataclasses.replace(Share.whole(), is_last=False)
    changed = bytearray(payload)
    changed[record.parts[0].offset] ^= 1
    deadline = Deadline(DEADLINE)
    with PeerConnection(owner.me, 1, holder.server.address, deadline) as peer:
        for data in (payload, memoryview(changed)):
            peer.store(owner.owner, record, data, deadline, share=share)
        end = dataclasses.replace(share, start=record.payload_bytes, is_last=True)
        with pytest.raises(DamagedError):
            peer.store(owner.owner, record, payload[:0], deadline, share=end)
    assert holder.held[0].records() == ()
