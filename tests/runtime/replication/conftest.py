# SPDX-License-Identifier: Apache-2.0
"""What the tests of replication share: processes with a store, a server and a sender each."""

import contextlib
import ctypes
import dataclasses
import struct
import threading
import time
from datetime import timedelta

import pytest

from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.peers.sender import SlotSender
from megatron_moevement.runtime.peers.server import ReplicaServer
from megatron_moevement.runtime.peers.stored_slots import StoredSlots
from megatron_moevement.runtime.slots.ring_file import RingShape
from megatron_moevement.runtime.slots.slot_record import EXTRAS, SlotPart, SlotRecord
from megatron_moevement.runtime.slots.store_identity import StoreIdentity
from megatron_moevement.runtime.stores.store import RingRole, StoreDirectory
from megatron_moevement.runtime.transport.handshake import Session
from megatron_moevement.runtime.transport.tcp import TCP

TOKEN = b"a secret of this job"
DEADLINE = timedelta(seconds=20)
IDENTITY = StoreIdentity("run-1", "0123abcd")
SHAPE = RingShape.equal(capacity=6, buffer_bytes=5000, max_parts=3)
LARGE_SHAPE = RingShape.equal(capacity=2, buffer_bytes=8 * 2**20, max_parts=3)
W = 3
HEADER = struct.Struct("<4sBBIQQ")
"""Of a message, up to its checksum."""


def rank_of(process):
    return LogicalRank(dp=process)


class MovedSender(SlotSender):
    """Is told where its peers are while it sends."""

    def set_address(self, process, address):
        self._addresses[process] = address
        self.try_again(process)


class Process:
    """What one process of a job has; process n occupies the n-th replica and keeps for others."""

    def __init__(self, root, number, ranks, shape=SHAPE, token=TOKEN, generation=5, transport=TCP):
        self.me = Session(token, number, generation, transport)
        self.owner = rank_of(number)
        self.store = StoreDirectory(root, IDENTITY, number)
        self.ring = self.store.ring(RingRole.OWN, self.owner, shape)
        self.arrived = []
        self.slots = StoredSlots(self.ring, stored=lambda slot, record: self.arrived.append(slot))
        self.held = {}
        for other in range(ranks):
            if other != number:
                ring = self.store.ring(RingRole.HELD, rank_of(other), shape)
                self.held[other] = ring
                self.slots.keep(ring)
        self.server = ReplicaServer("127.0.0.1", self.me, self.slots, deadline=DEADLINE)

    def sender(self, *peers, deadline=DEADLINE, **changes):
        addresses = {peer.me.process: peer.server.address for peer in peers}
        return MovedSender(dataclasses.replace(self.me, **changes), addresses, deadline=deadline)

    def close(self):
        self.server.close()
        self.store.close()


@pytest.fixture
def job(shared_memory):
    """Returns a function that starts processes; all are closed after the test."""
    started = []

    def start(count=2, **changes):
        first = len(started)
        for number in range(first, first + count):
            started.append(Process(shared_memory, number, first + count, **changes))
        return started[-count:]

    yield start
    for process in started:
        process.close()


def capture(ring, step, size_bytes=3000):
    """Writes and publishes a slot of three parts, different at every step; returns its record."""
    buffer = ring.reserve(step)
    extras_bytes = 100
    parts = []
    places = (("layers.0.gate", 0, size_bytes // 3), ("head", size_bytes // 3, size_bytes // 2))
    for name, offset, size in (*places, (EXTRAS, size_bytes - extras_bytes, extras_bytes)):
        pattern = f"{ring.owner} {step} {name};".encode()
        buffer[offset : offset + size] = (pattern * (size // len(pattern) + 1))[:size]
        parts.append(SlotPart.of(name, offset, buffer[offset : offset + size]))
    start, slot = step - step % W, step % W
    record = SlotRecord(0, Window(start, W), slot, step, size_bytes, tuple(parts))
    return ring.publish(record)


def key_of(owner, record):
    return SlotKey(owner, record.window, record.slot)


class InterruptedTestError(Exception):
    """As a restart raises it in the training thread."""


@contextlib.contextmanager
def interrupted_once(ready):
    """Raises in this thread, wherever it is, once a condition holds; it must not be caught."""
    training = threading.get_ident()

    def interrupt():
        latest_s = time.monotonic() + DEADLINE.total_seconds() / 4
        while not ready() and time.monotonic() < latest_s:
            time.sleep(0.01)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(training), ctypes.py_object(InterruptedTestError)
        )

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(InterruptedTestError):
        yield
    interrupting.join()
