"""How long a slot takes to a holder and back, with its proofs and checksums, over 127.0.0.1.

    .venv/bin/python benchmarks/transfers.py                   # 256 MiB, 7 rounds
    .venv/bin/python benchmarks/transfers.py --mib 64 --rounds 20

Prints medians after a first round that is not counted, and what they are per second. Compare two
versions by running them in turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.peers.sender import SlotSender
from megatron_moevement.runtime.peers.server import ReplicaServer
from megatron_moevement.runtime.peers.stored_slots import StoredSlots
from megatron_moevement.runtime.slots.ring_file import RingShape
from megatron_moevement.runtime.slots.slot_record import SlotPart, SlotRecord
from megatron_moevement.runtime.slots.store_identity import StoreIdentity
from megatron_moevement.runtime.stores.store import (
    RingRole,
    StoreDirectory,
)
from megatron_moevement.runtime.transport.handshake import Session

MIB = 1 << 20
OWNER, HOLDER = LogicalRank(), LogicalRank(dp=1)
KEY = b"the key of this benchmark's processes"
DEADLINE = timedelta(seconds=100)


def time_transfers(root: Path, size_bytes: int, rounds: int) -> tuple[list[float], list[float]]:
    """Returns the seconds of each round's send and fetch."""
    identity, shape = StoreIdentity("benchmark", "0"), RingShape(1, size_bytes, 1)
    with StoreDirectory(root, identity, 0) as own, StoreDirectory(root, identity, 1) as other:
        ring = own.ring(RingRole.OWN, OWNER, shape)
        slots = StoredSlots(other.ring(RingRole.OWN, HOLDER, shape))
        slots.keep(other.ring(RingRole.HELD, OWNER, shape))
        part = SlotPart.of("head", 0, ring.buffer(0)[:size_bytes])
        record = SlotRecord(0, Window(0, 1), 0, 0, size_bytes, (part,))
        ring.publish(record)
        target = memoryview(bytearray(size_bytes))
        with (
            ReplicaServer("127.0.0.1", Session(KEY, 1, 0), slots, deadline=DEADLINE) as server,
            SlotSender(Session(KEY, 0, 0), {1: server.address}, deadline=DEADLINE) as sender,
        ):
            payload, key = ring.payload(record), SlotKey(OWNER, record.window, 0)

            def send() -> None:
                sender.send(OWNER, record, payload, (1,))[1].result()

            def fetch() -> None:
                sender.fetch(1, key, target)

            pairs = [(_seconds(send), _seconds(fetch)) for _ in range(rounds + 1)]
            payload.release()
    sends, fetches = zip(*pairs[1:], strict=True)
    return list(sends), list(fetches)


def _seconds(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def main() -> None:
    """Measures, and prints a line for each direction."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256, help="size of the slot (256)")
    parser.add_argument("--rounds", type=int, default=7, help="that are counted (7)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        measured = time_transfers(Path(folder), given.mib * MIB, given.rounds)
    for name, seconds in zip(("send", "fetch"), measured, strict=True):
        median = statistics.median(seconds)
        print(f"{name}: {median:.4f} s, {given.mib * MIB / median / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
