# SPDX-License-Identifier: Apache-2.0
"""What the processes of a job ask of the control store, by their number; no ranks, on one core.

Run `python benchmarks/store_load.py`. The ranks do not exist: one after the other calls what a rank
calls, with a store in this process that counts (`tests/harness/counting_store.py`). CPU time of a
question is measured with a real store, client and server together, so what all processes ask takes
the server less than the product.
"""

from __future__ import annotations

import argparse
import dataclasses
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord
from nvidia_resiliency_ext.inprocess.state import State
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where tests.harness is

from megatron_moevement.cli.stores import serve_store
from megatron_moevement.integrations.nvrx.control_store import ControlStore, GenerationStore
from megatron_moevement.settings.secret import Secret
from tests.harness.counting_store import CountingStore, SealedMember, SharedKeys
from tests.harness.stepped_roll_call import SteppedRollCall

NOBODY_WAITS = timedelta(0)
LARGEST_BYTES = 4096
"""Of an answer at a barrier, at most."""
QUESTIONS = 20_000
HOST = "gpu-node-{:05}"
RANKS_OF_A_NODE = 8
KINDS = (Interruption.EXCEPTION, Interruption.SOFT_TIMEOUT)


@dataclasses.dataclass(frozen=True)
class Cost:
    """What all processes ask for, once.

    Attributes:
        most_requests: of one process.
        largest_bytes: of one answer.
    """

    requests: int
    most_requests: int
    read_bytes: int
    largest_bytes: int


def cost_of(stores: Sequence[CountingStore]) -> Cost:
    """Returns what processes have asked for."""
    loads = [store.load for store in stores]
    return Cost(
        sum(load.requests.total() for load in loads),
        max(load.requests.total() for load in loads),
        sum(load.read_bytes for load in loads),
        max(load.largest() for load in loads),
    )


def roll(ranks: int) -> Cost:
    """Has all processes call the roll, and all look once more while one reads who is there."""
    met = SteppedRollCall(ranks)
    met.meet()
    return cost_of([member.store for member in met.members])


def barrier(ranks: int) -> Cost:
    """Has all ranks arrive at a barrier."""
    keys = SharedKeys()
    members = [SealedMember(keys) for _ in range(ranks)]
    for rank, member in enumerate(members):
        member.iteration_barrier(ranks=[rank], rendezvous_count=ranks, timeout=NOBODY_WAITS)
    return cost_of(members)


def assignment(ranks: int) -> Cost:
    """Has all ranks write and read who takes part, as once at the start."""
    keys = SharedKeys()
    members = [SealedMember(keys) for _ in range(ranks)]
    for rank, member in enumerate(members):
        member.send_state(State(rank=rank, world_size=ranks), rank)
        member.send_key(["job"], rank)
        member.send_host(HOST.format(rank // RANKS_OF_A_NODE), rank)
    for member in members[:2]:  # the first reads for all, another one stands for the others
        member.get_states(range(ranks))
        member.get_keys(range(ranks))
        member.get_hosts(range(ranks))
    first, other = (cost_of([member]) for member in members[:2])
    return Cost(
        first.requests + (ranks - 1) * other.requests,
        max(first.most_requests, other.most_requests),
        first.read_bytes + (ranks - 1) * other.read_bytes,
        max(first.largest_bytes, other.largest_bytes),
    )


def reasons(ranks: int) -> Cost:
    """Has all ranks meet after a fault, and read why the generation ended.

    Each has added a reason of its own: those of two kinds take turns, which makes the result long.
    """
    keys = SharedKeys()
    writer = SealedMember(keys)
    for rank in range(ranks):
        writer.record_interrupted([InterruptionRecord(rank, KINDS[rank % len(KINDS)])])
    members = [SealedMember(keys) for _ in range(ranks)]
    for rank, member in enumerate(members):
        member.get_interruption_records()
        member.iteration_barrier(ranks=[rank], rendezvous_count=ranks, timeout=NOBODY_WAITS)
    for member in members:
        member.wake()
    return cost_of(members)


def question_s() -> float:
    """Returns the CPU time of the question that each rank asks in the commit of a step on NCCL."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = serve_store(listener, "127.0.0.1")
    limit, secret = timedelta(seconds=20), Secret(b"s" * 64)
    store = GenerationStore(0, ControlStore("127.0.0.1", port, limit, secret))
    store.is_interrupted()
    start_s = time.process_time()
    for _ in range(QUESTIONS):
        store.is_interrupted()
    spent_s = time.process_time() - start_s
    del server
    return spent_s / QUESTIONS


PARTS = {
    "start: roll call": roll,
    "a barrier": barrier,
    "start: who takes part": assignment,
    "a restart: a barrier, and a reason of each rank": reasons,
}


def show(costs: Mapping[int, Mapping[str, Cost]], one_s: float) -> Table:
    """Returns a table: a column for each number of ranks."""
    table = Table(title=f"one question: {one_s * 1e6:.0f} us of CPU, client and server", box=None)
    table.add_column("ranks")
    for ranks in costs:
        table.add_column(f"{ranks:,}", justify="right")
    for part in PARTS:
        found = [costs[ranks][part] for ranks in costs]
        table.add_row(f"{part}: requests of all", *(f"{one.requests:,}" for one in found))
        table.add_row("  requests of one, at most", *(f"{one.most_requests:,}" for one in found))
        table.add_row("  MB read by all", *(f"{one.read_bytes / 1e6:,.1f}" for one in found))
        table.add_row("  largest answer, bytes", *(f"{one.largest_bytes:,}" for one in found))
    steps = (f"{ranks * one_s * 1e3:.1f}" for ranks in costs)
    table.add_row("a step on NCCL: one question of each rank, ms", *steps)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 128, 1024])
    args = parser.parse_args()
    costs = {
        ranks: {part: act(ranks) for part, act in PARTS.items()} for ranks in sorted({*args.ranks})
    }
    Console(width=120).print(show(costs, question_s()))
    largest = max(each["a barrier"].largest_bytes for each in costs.values())
    if largest > LARGEST_BYTES:
        sys.exit(f"an answer at a barrier has {largest} bytes, limit {LARGEST_BYTES}")


if __name__ == "__main__":
    main()
