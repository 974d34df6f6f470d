# SPDX-License-Identifier: Apache-2.0
"""How long a slot, a log and a live state take between two processes, over 127.0.0.1.

    .venv/bin/python benchmarks/transfers.py                   # 256 MiB, 7 rounds
    .venv/bin/python benchmarks/transfers.py --mib 64 --rounds 20
    .venv/bin/python benchmarks/transfers.py --connection-mb-per-s 100

With all proofs and checksums. Prints medians after a first round that is not counted, and what they
are per second. Compare two versions by running them in turns.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch

from megatron_moevement.integrations.megatron.slot_layout import Part
from megatron_moevement.integrations.megatron.snapshots import Piece
from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.job.boundary import BoundaryTag, Direction
from megatron_moevement.policy.job.operators import OperatorId, OperatorKind
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.job.state_recipe import Content
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.peers.log_reader import LogReader
from megatron_moevement.runtime.peers.sender import SlotSender
from megatron_moevement.runtime.peers.server import ReplicaServer
from megatron_moevement.runtime.peers.state_reader import StateReader
from megatron_moevement.runtime.peers.stored_slots import StoredSlots
from megatron_moevement.runtime.slots.ring_file import RingShape
from megatron_moevement.runtime.slots.slot_record import SlotPart, SlotRecord
from megatron_moevement.runtime.slots.store_identity import StoreIdentity
from megatron_moevement.runtime.stores.store import (
    RingRole,
    StoreDirectory,
)
from megatron_moevement.runtime.transport.handshake import Session
from megatron_moevement.runtime.transport.tcp import TCP, Tcp, TcpListener
from megatron_moevement.runtime.transport.transport import Transport
from megatron_moevement.runtime.upstream_log.log import UpstreamLog

MIB = 1 << 20
STEP = 1
TENSOR_BYTES = 8 * MIB
"""Of a logged tensor."""
EXPERT_BYTES = 24 * MIB
"""Of the state of each operator but the embedding, which has a quarter of all."""
OWNER, HOLDER = LogicalRank(), LogicalRank(dp=1)
KEY = b"the key of this benchmark's processes"
DEADLINE = timedelta(seconds=100)
_SO_MAX_PACING_RATE = 47
"""Of Linux, which the socket module has no name for; accepted connections inherit it."""


class PacedTcp(Tcp):
    """TCP of which each connection brings so many bytes per second."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s

    def listen(self, interface: str) -> TcpListener:
        """Listens on a free port of an interface."""
        listening = socket.create_server((interface, 0))
        listening.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, self._bytes_per_s)
        return TcpListener(listening)


def time_slots(
    root: Path, size_bytes: int, rounds: int, transport: Transport
) -> dict[str, list[float]]:
    """Returns the seconds of each round's send and fetch."""
    identity, shape = StoreIdentity("benchmark", "0"), RingShape.equal(1, size_bytes, 1)
    with StoreDirectory(root, identity, 0) as own, StoreDirectory(root, identity, 1) as other:
        ring = own.ring(RingRole.OWN, OWNER, shape)
        slots = StoredSlots(other.ring(RingRole.OWN, HOLDER, shape))
        slots.keep(other.ring(RingRole.HELD, OWNER, shape))
        part = SlotPart.of("head", 0, ring.reserve(0)[:size_bytes])
        record = SlotRecord(0, Window(0, 1), 0, 0, size_bytes, (part,))
        ring.publish(record)
        target = memoryview(bytearray(size_bytes))
        me, peer = Session(KEY, 0, 0, transport), Session(KEY, 1, 0, transport)
        with (
            ReplicaServer("127.0.0.1", peer, slots, deadline=DEADLINE) as server,
            SlotSender(me, {1: server.address}, deadline=DEADLINE) as sender,
        ):
            payload, key = ring.payload(record), SlotKey(OWNER, record.window, 0)

            def send() -> None:
                sender.send(OWNER, record, payload, (1,))[1].result()

            def fetch() -> None:
                sender.fetch(1, key, lambda _: target)

            pairs = [(_seconds(send), _seconds(fetch)) for _ in range(rounds + 1)]
            payload.release()
    sends, fetches = zip(*pairs, strict=True)
    return {"slot sent": list(sends), "slot fetched": list(fetches)}


class StandingOperators:
    """A live state of two operators or more, read as that of a rank is."""

    def __init__(self, size_bytes: int) -> None:
        """Makes an embedding of a quarter of the bytes, and experts."""
        count = max(1, 3 * size_bytes // 4 // EXPERT_BYTES)
        sizes = {OperatorId(OperatorKind.EMBEDDING): size_bytes // 4} | {
            OperatorId(OperatorKind.EXPERT, 0, number): 3 * size_bytes // 4 // count
            for number in range(count)
        }
        self.parts = {part.name: part for part in map(_part, sizes, sizes.values())}

    def read(self, step: int, part: str, wanted: slice = slice(None)) -> tuple[memoryview, int]:
        """Returns bytes of a part, and how many it has."""
        assert step == STEP
        return self.parts[part].read(wanted), self.parts[part].size_bytes


def _part(operator: OperatorId, size_bytes: int) -> Part:
    names = ("master", "exp_avg", "exp_avg_sq")
    tensors = [torch.rand(size_bytes // 4 // len(names)) for _ in names]
    pieces = tuple(map(Piece, names, tensors, [torch.float32] * len(names)))
    return Part(operator, Content.FULL, 0, pieces)


def time_log(size_bytes: int, rounds: int, transport: Transport) -> list[float]:
    """Returns the seconds that each round takes for a step of a log."""
    log = UpstreamLog(max_steps=1, step_bytes=size_bytes)
    log.begin_step(STEP)
    count = max(1, size_bytes // TENSOR_BYTES)
    tags = [BoundaryTag(STEP, Direction.FORWARD, 0, 1, number) for number in range(count)]
    for tag in tags:
        tensor = torch.rand(size_bytes // count // 4)
        place = log.reserve(tag, tensor)
        assert place is not None
        place.copy_(tensor)
        log.land(tag, place)
    log.end_step(STEP)
    me, peer = Session(KEY, 0, 0, transport), Session(KEY, 1, 0, transport)

    def fetch() -> None:
        with LogReader(me, addresses, deadline=DEADLINE, step_bytes=size_bytes) as reader:
            reader.prefetch(1, tags)
            for tag in tags:
                reader.take(1, tag).clone()

    with ReplicaServer("127.0.0.1", peer, StoredSlots(None), deadline=DEADLINE, log=log) as server:
        addresses = {1: server.address}
        return [_seconds(fetch) for _ in range(rounds + 1)]


def time_state(size_bytes: int, rounds: int, transport: Transport) -> list[float]:
    """Returns the seconds that each round takes for a live state, into live tensors."""
    there, here = StandingOperators(size_bytes), StandingOperators(size_bytes)
    sizes = {name: part.size_bytes for name, part in there.parts.items()}
    me, peer = Session(KEY, 0, 0, transport), Session(KEY, 1, 0, transport)

    def copy() -> None:
        with StateReader(me, 1, address, deadline=DEADLINE, size_bytes=size_bytes) as reader:
            for name, payload in reader.take(STEP, sizes):
                part = here.parts[name]
                views = part.views(torch.frombuffer(payload, dtype=torch.uint8))
                for piece, view in zip(part.pieces, views, strict=True):
                    piece.elements.copy_(view)

    with ReplicaServer("127.0.0.1", peer, StoredSlots(None), deadline=DEADLINE) as server:
        address = server.address
        server.offer(there)
        seconds = [_seconds(copy) for _ in range(rounds + 1)]
    pieces = [
        (piece.live, other.live)
        for name, part in there.parts.items()
        for piece, other in zip(part.pieces, here.parts[name].pieces, strict=True)
    ]
    assert all(torch.equal(one, other) for one, other in pieces)
    return seconds


def _seconds(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def main() -> None:
    """Measures, and prints a line for each kind of transfer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256, help="size of each (256)")
    parser.add_argument("--rounds", type=int, default=7, help="that are counted (7)")
    parser.add_argument(
        "--connection-mb-per-s", type=int, help="what each connection brings at most"
    )
    given = parser.parse_args()
    size_bytes, rounds = given.mib * MIB, given.rounds
    paced = given.connection_mb_per_s
    transport = TCP if paced is None else PacedTcp(paced * 10**6)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        measured = time_slots(Path(folder), size_bytes, rounds, transport)
    measured["log fetched"] = time_log(size_bytes, rounds, transport)
    measured["live state copied"] = time_state(size_bytes, rounds, transport)
    for name, seconds in measured.items():
        median = statistics.median(seconds[1:])
        print(f"{name}: {median:.4f} s, {size_bytes / median / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
