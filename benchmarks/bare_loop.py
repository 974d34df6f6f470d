# SPDX-License-Identifier: Apache-2.0
"""What can't be avoided for a captured byte: it is copied, hashed, sent to two peers, received."""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from transfers import DEADLINE, KEY, OWNER

from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.peers.sender import SlotSender
from megatron_moevement.runtime.peers.server import ReplicaServer
from megatron_moevement.runtime.peers.stored_slots import StoredSlots
from megatron_moevement.runtime.slots.ring_file import RingFile, RingShape
from megatron_moevement.runtime.slots.slot_record import SlotPart, SlotRecord
from megatron_moevement.runtime.slots.store_identity import StoreIdentity
from megatron_moevement.runtime.stores.store import RingRole, StoreDirectory
from megatron_moevement.runtime.transport.handshake import Session

PEERS = 2


def bare_loop(size_bytes: int, rounds: int) -> float:
    """Returns the CPU seconds per byte of copying, hashing, sending and receiving."""
    identity, shape = StoreIdentity("benchmark", "0"), RingShape.equal(2, size_bytes, 1)
    source = memoryview(bytearray(np.random.default_rng(0).bytes(size_bytes)))
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        stores = [
            stack.enter_context(StoreDirectory(root, identity, process))
            for process in range(1 + PEERS)
        ]
        ring = stores[0].ring(RingRole.OWN, OWNER, shape)
        addresses = {}
        for process, store in enumerate(stores[1:], 1):
            slots = StoredSlots(store.ring(RingRole.OWN, LogicalRank(dp=process), shape))
            slots.keep(store.ring(RingRole.HELD, OWNER, shape))
            server = ReplicaServer("127.0.0.1", Session(KEY, process, 0), slots, deadline=DEADLINE)
            addresses[process] = stack.enter_context(server).address
        sender = SlotSender(Session(KEY, 0, 0), addresses, deadline=DEADLINE)
        stack.enter_context(sender)
        for step in range(2):  # connections, and pages that nobody has touched yet
            _copy_to_peers(step, source, ring, sender)
        began_s = time.process_time()
        for step in range(2, 2 + rounds):
            _copy_to_peers(step, source, ring, sender)
        return (time.process_time() - began_s) / (rounds * size_bytes)


def _copy_to_peers(step: int, source: memoryview, ring: RingFile, sender: SlotSender) -> None:
    buffer = ring.reserve(step)
    buffer[:] = source
    record = SlotRecord(
        0, Window(step, 1), 0, step, source.nbytes, (SlotPart.of("head", 0, buffer),)
    )
    record = ring.publish(record)
    payload = ring.payload(record)
    for outcome in sender.send(OWNER, record, payload, range(1, 1 + PEERS)).values():
        outcome.result()
    payload.release()
    buffer.release()
