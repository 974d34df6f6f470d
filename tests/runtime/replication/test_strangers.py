# SPDX-License-Identifier: Apache-2.0
"""Who does not belong to the job gets nothing written, nothing allocated and nothing answered."""

import contextlib
import errno
import json
import logging
import pickle
import socket
import struct
import threading
import time
import tracemalloc
from datetime import timedelta

import pytest
import xxhash

from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.runtime.peers import server as server_module
from megatron_moevement.runtime.peers.sender import FetchError, SilentPeerError
from megatron_moevement.runtime.peers.server import ReplicaServer
from megatron_moevement.runtime.peers.slot_messages import Share, share_document
from megatron_moevement.runtime.slots.slot_record import SlotRecord
from megatron_moevement.runtime.transport.admission import Admission
from megatron_moevement.runtime.transport.handshake import Session, call
from megatron_moevement.runtime.transport.tcp import TCP
from megatron_moevement.runtime.transport.transport import Deadline
from megatron_moevement.runtime.transport.wire import PROTOCOL_VERSION, Channel, Kind

from .conftest import DEADLINE, HEADER, SHAPE, TOKEN, capture, key_of


def header(
    kind=Kind.HELLO, length=0, payload=0, generation=5, *, magic=b"MOEV", version=PROTOCOL_VERSION
):
    return HEADER.pack(magic, version, kind, length, payload, generation) + bytes(8)


def message(kind, document, **changes):
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    start = header(kind, len(text), **changes)[: HEADER.size]
    return start + struct.pack("<Q", xxhash.xxh3_64_intdigest(start + text)) + text


HELLO = {"process": 1, "challenge": "00" * 32}
STRANGE = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + b"x" * 100,
    "a pickle": pickle.dumps({"process": 1}) * 10,
    "half a header": header()[:10],
    "another version": message(Kind.HELLO, HELLO, version=1),
    "a huge document": header(length=2**32 - 1),
    "a document that is too long before the proof": header(length=1025) + b" " * 1025,
    "no kind": header(kind=99),
    "a damaged document": message(Kind.HELLO, HELLO)[:-1] + b" ",
    "no JSON": message(Kind.HELLO, b"{"),
    "no UTF-8": message(Kind.HELLO, b'{"\xff": 1}'),
    "a deep document": message(Kind.HELLO, b"[" * 1000),
    "a list": message(Kind.HELLO, b"[]"),
    "no process": message(Kind.HELLO, {"challenge": "00" * 32}),
    "a process that is no number": message(Kind.HELLO, HELLO | {"process": True}),
    "a process that is too large": message(Kind.HELLO, HELLO | {"process": 2**70}),
    "no challenge": message(Kind.HELLO, {"process": 1}),
    "a short challenge": message(Kind.HELLO, HELLO | {"challenge": "00"}),
    "a challenge that is no text": message(Kind.HELLO, HELLO | {"challenge": 3}),
    "a payload before the proof": message(Kind.HELLO, HELLO, payload=2**62),
    "a slot before the proof": message(Kind.SLOT, {}, payload=100) + bytes(100),
    "a wrong proof": message(Kind.HELLO, HELLO) + message(Kind.PROOF, {"proof": "0" * 64}),
    "a proof that is no text": message(Kind.HELLO, HELLO) + message(Kind.PROOF, {"proof": 1}),
    "a proof of strange text": message(Kind.HELLO, HELLO)
    + message(Kind.PROOF, {"proof": "\ud800"}),
    "no proof": message(Kind.HELLO, HELLO) + message(Kind.FETCH, {}),
}


@contextlib.contextmanager
def hang_ups_allowed():
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN):
            raise


def said_to(address, data):
    """Returns what a server answers to bytes, until it hangs up."""
    with socket.create_connection(address, timeout=10) as connection:
        answer = b""
        with hang_ups_allowed():
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(65536):
                answer += piece
        return answer


def await_log(caplog, words):
    limit = time.monotonic() + 10
    while words not in caplog.text and time.monotonic() < limit:
        time.sleep(0.01)
    assert words in caplog.text


@pytest.mark.parametrize("data", STRANGE.values(), ids=STRANGE)
def test_a_stranger_is_hung_up_on_and_the_server_goes_on(job, caplog, data):
    caplog.set_level(logging.DEBUG)
    owner, holder = job(2)
    answer = said_to(holder.server.address, data)
    assert answer == b"" or HEADER.unpack_from(answer)[2] == Kind.CHALLENGE
    assert b"record" not in answer
    await_log(caplog, "replication: connection of 127.0.0.1:")
    record = capture(owner.ring, 3)
    with owner.sender(holder) as sender:
        outcomes = sender.send(owner.owner, record, owner.ring.payload(record), (1,))
        assert outcomes[1].result() is None
    assert len(holder.arrived) == 1
    assert holder.held[0].records() == (record,)


def test_announced_lengths_allocate_nothing(job):
    (process,) = job(1)
    tracemalloc.start()
    try:
        for data in (header(length=2**32 - 1), header(payload=2**64 - 1), header(length=1025)):
            said_to(process.server.address, data)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2**20


def test_who_has_another_token_is_refused_on_both_sides(job):
    owner, holder = job(2)
    record = capture(owner.ring, 3)
    with owner.sender(holder, token=b"the secret of another") as sender:
        outcome = sender.send(owner.owner, record, owner.ring.payload(record), (1,))[1]
        assert isinstance(outcome.exception(), SilentPeerError)
        assert sender.account.silent == {1: "the peer does not have the job's token"}
        into = memoryview(bytearray(SHAPE.buffer_bytes))
        with pytest.raises(FetchError, match="does not have the job's token"):
            sender.fetch(1, key_of(owner.owner, record), lambda _: into)
    assert holder.held[0].records() == ()


def test_a_caller_that_skips_its_own_check_is_found_out_by_the_server(job, caplog):
    (process,) = job(1)
    with socket.create_connection(process.server.address, timeout=10) as connection:
        connection.sendall(message(Kind.HELLO, HELLO))
        connection.recv(65536)
        connection.sendall(message(Kind.PROOF, {"proof": "ab" * 32}))
        assert connection.recv(65536) == b""
    await_log(caplog, "the peer does not have the job's token")


def test_what_was_overheard_opens_no_second_connection(job):
    owner, holder = job(2)
    heard = bytearray()

    class Overheard(Channel):
        def send(self, kind, generation, document, payload, deadline):
            heard.extend(message(kind, document, generation=generation))
            super().send(kind, generation, document, payload, deadline)

    with Overheard(TCP.dial(holder.server.address, Deadline(DEADLINE))) as channel:
        call(channel, owner.me, 1, Deadline(DEADLINE))
    answer = said_to(holder.server.address, bytes(heard))
    kinds = []
    while answer:
        _, _, kind, length, _, _ = HEADER.unpack_from(answer)
        kinds.append(kind)
        answer = answer[HEADER.size + 8 + length :]
    assert kinds == [Kind.CHALLENGE]


@pytest.mark.parametrize("generation", [4, 6])
def test_another_generation_is_refused_with_the_reason(job, generation):
    owner, holder = job(2)
    record = capture(owner.ring, 3)
    with owner.sender(holder, generation=generation) as sender:
        outcome = sender.send(owner.owner, record, owner.ring.payload(record), (1,))[1]
        assert isinstance(outcome.exception(), SilentPeerError)
        assert sender.account.silent == {1: f"a caller of generation {generation} in generation 5"}
    assert holder.held[0].records() == ()


def test_a_peer_that_lives_on_in_the_next_generation_is_reached_there(job):
    owner, holder = job(2)
    record = capture(owner.ring, 3)
    with (
        ReplicaServer("127.0.0.1", Session(TOKEN, 1, 6), holder.slots, deadline=DEADLINE) as server,
        owner.sender(holder, generation=6) as sender,
    ):
        payload = owner.ring.payload(record)
        assert sender.send(owner.owner, record, payload, (1,))[1].exception() is not None
        sender.set_address(1, server.address)
        assert sender.send(owner.owner, record, payload, (1,))[1].result() is None


def test_a_process_that_answers_for_another_is_refused(job):
    owner, holder, _ = job(3)
    record = capture(owner.ring, 3)
    with owner.sender() as sender:
        sender.set_address(2, holder.server.address)
        sender.send(owner.owner, record, owner.ring.payload(record), (2,))[2].exception()
        assert sender.account.silent == {2: "process 1 answers for process 2"}
    assert holder.held[0].records() == ()


PEER_ERRORS = {
    "another generation": (lambda good: (Kind.SLOT, 4, good, 3000), "a message of generation 4"),
    "no request": (lambda good: (Kind.WELCOME, 5, good, 0), "is no request"),
    "no owner": (lambda good: (Kind.SLOT, 5, good | {"owner": "me"}, 3000), ""),
    "no record": (lambda good: (Kind.SLOT, 5, good | {"record": {}}, 3000), ""),
    "less than it says": (lambda good: (Kind.SLOT, 5, good, 2999), "2999 bytes of 3000"),
    "more than it says": (lambda good: (Kind.SLOT, 5, good, 3001), "3001 bytes of 3000"),
    "no share": (lambda good: (Kind.SLOT, 5, {**good, "share": [1, -1, True]}, 3000), "no share"),
    "beside no list": (lambda good: (Kind.SLOT, 5, {**good, "beside": 3}, 3000), "beside 3"),
    "beside a text": (
        lambda good: (Kind.SLOT, 5, {**good, "beside": [[0, 3, 0, "0"]]}, 3000),
        "no window and slot",
    ),
    "a share outside": (
        lambda good: (Kind.SLOT, 5, {**good, "share": [1, 2000, False]}, 1001),
        "1001 bytes of 3000 from 2000 on",
    ),
    "a last share that is short": (
        lambda good: (Kind.SLOT, 5, {**good, "share": [1, 2000, True]}, 999),
        "999 bytes of 3000 from 2000 on",
    ),
    "a fetch with a payload": (lambda good: (Kind.FETCH, 5, good, 3000), "with a payload"),
    "a fetch of nothing": (lambda good: (Kind.FETCH, 5, {"owner": good["owner"]}, 0), ""),
    "a fetch of text": (
        lambda good: (
            Kind.FETCH,
            5,
            {"owner": good["owner"], "window": ["0", "3", "0"], "slot": "0", "range": ["0", "1"]},
            0,
        ),
        "no window, slot and range",
    ),
    "a fetch from before the first byte": (
        lambda good: (
            Kind.FETCH,
            5,
            {"owner": good["owner"], "window": [0, 3, 0], "slot": 0, "range": [-1, 1]},
            0,
        ),
        "no range: -1, 1",
    ),
}


@pytest.mark.parametrize(("said", "reason"), PEER_ERRORS.values(), ids=PEER_ERRORS)
def test_a_peer_that_breaks_the_protocol_is_hung_up_on(job, caplog, said, reason):
    owner, holder = job(2)
    good = share_document(owner.owner, capture(owner.ring, 3), Share.whole())
    with Channel(TCP.dial(holder.server.address, Deadline(DEADLINE))) as channel:
        call(channel, owner.me, 1, Deadline(DEADLINE))
        kind, generation, document, size = said(good)
        payload = memoryview(bytes(size)) if size else None
        with hang_ups_allowed():
            channel.send(kind, generation, document, payload, Deadline(DEADLINE))
        with pytest.raises(ConnectionError):
            channel.receive(Deadline(DEADLINE))
    await_log(caplog, "connection of process 0 at 127.0.0.1:")
    assert reason in caplog.text
    assert "not what the peer sent" not in caplog.text
    assert holder.held[0].records() == ()


def test_a_slot_of_more_parts_than_the_ring_takes_is_refused(job):
    owner, holder = job(2)
    record = capture(owner.ring, 3)
    parts = tuple(
        part.of(f"{part.name}{'x' * 60}{number}", 0, owner.ring.payload(record)[:1])
        for number in range(5)
        for part in record.parts
    )
    large = SlotRecord(0, record.window, record.slot, 3, record.payload_bytes, parts)
    with owner.sender(holder) as sender:
        sender.send(owner.owner, large, owner.ring.payload(record), (1,))[1].exception()
        assert "has no room for slots of" in sender.account.silent[1]


def test_who_says_nothing_does_not_stay(job, monkeypatch, caplog):
    monkeypatch.setattr(server_module, "_HANDSHAKE_TIME", timedelta(milliseconds=100))
    caplog.set_level(logging.DEBUG)
    (process,) = job(1)
    with socket.create_connection(process.server.address, timeout=10) as connection:
        assert connection.recv(1) == b""


def few_strangers(process, **limits):
    return ReplicaServer("127.0.0.1", process.me, process.slots, deadline=DEADLINE, **limits)


def test_a_new_caller_takes_the_place_of_one_that_proved_nothing(job, caplog):
    owner, holder = job(2)
    record = capture(owner.ring, 3)
    with few_strangers(holder, max_unproven=2) as server, contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(server.address, timeout=10))
            for _ in range(5)
        ]
        for turned_away in silent[:3]:
            assert turned_away.recv(1) == b""
        await_log(caplog, "a caller at 127.0.0.1 is hung up on: too many proved nothing")
        sender = stack.enter_context(owner.sender())
        sender.set_address(1, server.address)
        outcomes = sender.send(owner.owner, record, owner.ring.payload(record), (1,))
        assert outcomes[1].result() is None


def test_callers_of_one_address_do_not_shut_out_those_of_another(job):
    owner, holder = job(2)
    with few_strangers(holder, max_unproven=8) as server, contextlib.ExitStack() as stack:
        slow = stack.enter_context(Channel(TCP.dial(server.address, Deadline(DEADLINE))))
        for _ in range(200):
            stack.enter_context(socket.create_connection(server.address, 10, ("127.0.0.2", 0)))
        call(slow, owner.me, 1, Deadline(DEADLINE))


def test_who_is_welcomed_has_that_room_already(job, monkeypatch):
    owner, holder = job(2)
    send, strangers, entered = Channel.send, [], threading.Semaphore(0)
    enter = Admission.enter

    def count(admission, channel, host):
        left = enter(admission, channel, host)
        entered.release()
        return left

    def send_after_strangers(channel, kind, *rest, **more):
        if kind is Kind.WELCOME:
            strangers.extend(socket.create_connection(server.address) for _ in range(3))
            assert all(entered.acquire(timeout=10) for _ in range(4))
        send(channel, kind, *rest, **more)

    monkeypatch.setattr(Admission, "enter", count)
    monkeypatch.setattr(Channel, "send", send_after_strangers)
    with (
        few_strangers(holder, max_unproven=2) as server,
        Channel(TCP.dial(server.address, Deadline(DEADLINE))) as peer,
    ):
        call(peer, owner.me, 1, Deadline(DEADLINE))
        for stranger in strangers:
            stranger.close()


def test_peers_have_room_of_their_own(job):
    owner, holder = job(2)
    with (
        few_strangers(holder, max_unproven=4, max_proved=1) as server,
        Channel(TCP.dial(server.address, Deadline(DEADLINE))) as first,
    ):
        call(first, owner.me, 1, Deadline(DEADLINE))
        strangers = [socket.create_connection(server.address) for _ in range(20)]
        first.send(Kind.RECEIVED, 5, {"step": 3}, None, Deadline(DEADLINE))
        assert first.receive(Deadline(DEADLINE)).kind is Kind.REFUSED
        for stranger in strangers:
            stranger.close()


def test_strangers_do_not_fill_the_log(job, caplog):
    (process,) = job(1)
    for _ in range(60):
        said_to(process.server.address, STRANGE["another version"])
    await_log(caplog, "no more such lines for 60 s")
    assert caplog.text.count("protocol version 1") <= 20


def test_a_token_that_can_be_guessed_is_refused():
    with pytest.raises(ValueError, match="less than 16 bytes"):
        Session(b"short", 0, 0)
    assert TOKEN.decode() not in repr(Session(TOKEN, 0, 0))


def test_an_owner_that_nobody_knows_is_not_found(job):
    (process,) = job(1)
    record, into = capture(process.ring, 3), memoryview(bytearray(SHAPE.buffer_bytes))
    with process.sender(process) as sender, pytest.raises(FetchError, match="does not hold"):
        sender.fetch(0, key_of(LogicalRank(cp=7), record), lambda _: into)
