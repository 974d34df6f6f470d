# SPDX-License-Identifier: Apache-2.0
"""A large log and a large live state come over several connections at a time."""

import itertools
import threading
import time
from collections import Counter
from datetime import timedelta

import pytest
import torch

from megatron_moevement.policy.job.boundary import BoundaryTag, Direction
from megatron_moevement.runtime.peers import peer_threads as threads_module
from megatron_moevement.runtime.peers import server as server_module
from megatron_moevement.runtime.peers.log_reader import LogReader, LogReadError
from megatron_moevement.runtime.peers.server import ReplicaServer
from megatron_moevement.runtime.peers.state_reader import StateReader, StateReadError
from megatron_moevement.runtime.transport.tcp import Tcp
from megatron_moevement.runtime.upstream_log.log import UpstreamLog
from tests.harness.loopback_transport import Link, Loopback

from .conftest import DEADLINE, interrupted_once

CONNECTIONS = 4
STEP = 7
MIB = 2**20
TAGS = [BoundaryTag(STEP, Direction.FORWARD, 0, 1, number) for number in range(8)]
SIZES = {"embedding:full": 4 * MIB + 5, **{f"layers.0.expert.{n}:full": MIB for n in range(4)}}
LOG_BYTES, STATE_BYTES = len(TAGS) * MIB, sum(SIZES.values())
SLOW = Link(bandwidth_bytes_per_s=2e6)


class Counting:
    """Counts the bytes that each of the connections brings that are dialed."""

    def __init__(self):
        self.received = Counter()
        self._numbers = itertools.count()

    def count(self, connection):
        number, receive_into = next(self._numbers), connection.receive_into
        self.received[number] = 0

        def receive(target, deadline):
            size_bytes = receive_into(target, deadline)
            self.received[number] += size_bytes
            return size_bytes

        connection.receive_into = receive
        connection.number = number
        return connection


class CountedTcp(Counting, Tcp):
    def dial(self, *arguments):
        return self.count(super().dial(*arguments))


class CountedLoopback(Counting, Loopback):
    def __init__(self, link=None):
        Counting.__init__(self)
        Loopback.__init__(self, link)

    def dial(self, *arguments):
        return self.count(super().dial(*arguments))


def tensor_of(tag):
    return torch.arange(MIB // 4, dtype=torch.float32) + tag.micro_batch


def bytes_of(name):
    return (name.encode() * (SIZES[name] // len(name) + 1))[: SIZES[name]]


class Log:
    """Reads what a process logged in a step of several tensors."""

    error = LogReadError
    size_bytes = LOG_BYTES

    def __init__(self, together=1):
        self.kept = UpstreamLog(max_steps=1, step_bytes=LOG_BYTES)
        self.kept.begin_step(STEP)
        for tag in TAGS:
            place = self.kept.reserve(tag, tensor_of(tag))
            place.copy_(tensor_of(tag))
            self.kept.land(tag, place)
        self.kept.end_step(STEP)
        serve, together = self.kept.serve, threading.Barrier(together)
        self.kept.serve = lambda tag: (together.wait(5), serve(tag))[1]

    def server(self, process):
        me = process.me
        return ReplicaServer("127.0.0.1", me, process.slots, deadline=DEADLINE, log=self.kept)

    def reader(self, me, addresses, deadline=DEADLINE, size_bytes=LOG_BYTES):
        return LogReader(me, addresses, deadline=deadline, step_bytes=size_bytes)

    def take(self, reader, process=0):
        reader.prefetch(process, TAGS)
        return [reader.take(process, tag) for tag in TAGS]

    def is_intact(self, taken):
        return all(torch.equal(each, tensor_of(tag)) for each, tag in zip(taken, TAGS, strict=True))


class State:
    """Reads the live state of a process: an operator that is large, and several that are not."""

    error = StateReadError
    size_bytes = STATE_BYTES

    def __init__(self, together=1):
        self._together = threading.Barrier(together)

    def read(self, step, part, wanted=slice(None)):
        assert step == STEP
        self._together.wait(5)
        return memoryview(bytes_of(part))[wanted], SIZES[part]

    def server(self, process):
        server = ReplicaServer("127.0.0.1", process.me, process.slots, deadline=DEADLINE)
        server.offer(self)
        return server

    def reader(self, me, addresses, deadline=DEADLINE, size_bytes=STATE_BYTES):
        ((process, address),) = addresses.items()
        return StateReader(me, process, address, deadline=deadline, size_bytes=size_bytes)

    def take(self, reader):
        return list(reader.take(STEP, SIZES))

    def is_intact(self, taken):
        return taken == [(name, bytes_of(name)) for name in SIZES]


KINDS = pytest.mark.parametrize("kind", [Log, State])
TRANSPORTS = pytest.mark.parametrize("transport", [CountedTcp, CountedLoopback])


@pytest.fixture(autouse=True)
def _parts(monkeypatch):
    monkeypatch.setattr(threads_module, "LEAST_PART_BYTES", MIB)


def reading_threads():
    names = [each.name for each in threading.enumerate()]
    return [name for name in names if name.startswith(("log-reader", "state-reader"))]


@KINDS
@TRANSPORTS
def test_what_is_large_comes_over_several_connections_at_a_time(job, kind, transport):
    transport = transport()
    holder, newcomer = job(2, transport=transport)
    source = kind(together=CONNECTIONS)  # nobody is served before as many ask
    with (
        source.server(holder) as server,
        source.reader(newcomer.me, {0: server.address}) as reader,
    ):
        assert source.is_intact(source.take(reader))
    assert len(transport.received) == CONNECTIONS
    assert min(transport.received.values()) >= 2 * MIB
    assert reading_threads() == []


@KINDS
def test_what_is_small_comes_over_one_connection(job, kind):
    transport = CountedTcp()
    holder, newcomer = job(2, transport=transport)
    source = kind()
    with (
        source.server(holder) as server,
        source.reader(newcomer.me, {0: server.address}, size_bytes=2 * MIB - 1) as reader,
    ):
        if kind is Log:
            assert torch.equal(reader.take(0, TAGS[0]), tensor_of(TAGS[0]))
        else:
            name = list(SIZES)[-1]
            assert list(reader.take(STEP, {name: MIB})) == [(name, bytes_of(name))]
    assert len(transport.received) == 1


@KINDS
@TRANSPORTS
def test_where_a_peer_is_lost_in_between_another_one_gives_it(job, kind, transport):
    transport = transport()
    holder, other, newcomer = job(3, transport=transport)
    first, second = kind(), kind()
    with first.server(holder) as server, second.server(other) as left:
        losing = threading.Thread(target=lose, args=(server, transport))
        losing.start()
        with (
            first.reader(newcomer.me, {0: server.address}) as reader,
            pytest.raises(kind.error, match="can't be had from process 0"),
        ):
            take_again(first, reader)
        losing.join()
        assert reading_threads() == []
        with second.reader(newcomer.me, {1: left.address}) as reader:
            taken = second.take(reader, 1) if kind is Log else second.take(reader)
            assert second.is_intact(taken)


def take_again(source, reader):
    for _ in range(10_000):
        source.take(reader)


def lose(server, transport):
    while sum(transport.received.values()) < STATE_BYTES // 2:
        time.sleep(0.001)
    server.close()


@KINDS
@pytest.mark.parametrize("broken", range(CONNECTIONS))
def test_one_connection_that_breaks_ends_all(job, kind, broken):
    class Breaking(CountedLoopback):
        def dial(self, *arguments):
            connection = super().dial(*arguments)
            send, sent = connection.send, []

            def break_off(data, deadline):
                sent.append(data)
                if connection.number == broken and len(sent) > 2:  # the proofs of who it is
                    connection.shut_down()
                send(data, deadline)

            connection.send = break_off
            return connection

    transport = Breaking(SLOW)
    holder, newcomer = job(2, transport=transport)
    source = kind()
    with (
        source.server(holder) as server,
        pytest.raises(source.error, match="the connection has ended"),
        source.reader(newcomer.me, {0: server.address}) as reader,
    ):
        source.take(reader)
    assert sum(transport.received.values()) < source.size_bytes * 3 // 4
    assert reading_threads() == []


@KINDS
def test_a_damaged_part_is_found_whoever_brings_it(job, monkeypatch, kind):
    source = kind()
    if kind is Log:
        logged_hash = source.kept.logged_hash
        monkeypatch.setattr(
            source.kept, "logged_hash", lambda tag: logged_hash(tag) ^ (tag == TAGS[2])
        )
    else:
        checksum_of, (name, size) = server_module.checksum_of, next(iter(SIZES.items()))
        third = bytes_of(name)[size * 2 // CONNECTIONS : size * 3 // CONNECTIONS]

        def third_is_wrong(payload):
            return checksum_of(payload) ^ (payload == third)

        monkeypatch.setattr(server_module, "checksum_of", third_is_wrong)
    holder, newcomer = job(2)
    with (
        source.server(holder) as server,
        source.reader(newcomer.me, {0: server.address}) as reader,
        pytest.raises(source.error, match="from process 0 arrived damaged"),
    ):
        source.take(reader)
    assert reading_threads() == []


@KINDS
def test_who_is_interrupted_leaves_no_thread(job, kind):
    transport = CountedLoopback(SLOW)
    holder, newcomer = job(2, transport=transport)
    source = kind()
    with source.server(holder) as server:
        with (
            interrupted_once(lambda: sum(transport.received.values()) > MIB),
            source.reader(newcomer.me, {0: server.address}) as reader,
        ):
            source.take(reader)
        assert reading_threads() == []


@KINDS
def test_it_takes_as_long_as_its_size_needs_while_it_moves_on(job, kind):
    holder, newcomer = job(2, transport=CountedLoopback(SLOW))
    source, deadline = kind(), timedelta(seconds=0.4)
    began_s = time.monotonic()
    with (
        source.server(holder) as server,
        source.reader(newcomer.me, {0: server.address}, deadline=deadline) as reader,
    ):
        assert source.is_intact(source.take(reader))
    assert time.monotonic() - began_s > 2 * deadline.total_seconds()
