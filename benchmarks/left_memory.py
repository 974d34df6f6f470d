# SPDX-License-Identifier: Apache-2.0
"""How long a survivor takes for facts and plan, and a newcomer for its files, by their memory.

Run `python benchmarks/left_memory.py --bytes 40e6 4e9`. For each size a process has so many bytes
of slots, its own and one rank's that it keeps copies for, in files of `--store` (in memory), and of
upstream log, half and half. Facts are read as a survivor reads them in a restart, and as a launch
reads them, which compares every checksum of the slots. The plan is that of a lost rank of a small
job. A newcomer makes files and a log of the same sizes, once after it has waited as a spare, once
not; nothing is pinned. Prints a line and a JSON object for each size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_moevement.policy.copies.journal_state import JournalState
from megatron_moevement.policy.copies.placement import Host
from megatron_moevement.policy.facts.facts import Facts
from megatron_moevement.policy.job.boundary import BoundaryTag, Direction
from megatron_moevement.policy.job.ranks import Layout, LogicalRank
from megatron_moevement.policy.recovery.recovery_planner import plan_recovery
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.slots.hashed_bytes import HASHED
from megatron_moevement.runtime.slots.journal import JournalShape
from megatron_moevement.runtime.slots.ring_file import RingFile, RingShape
from megatron_moevement.runtime.slots.slot_record import SlotPart, SlotRecord
from megatron_moevement.runtime.slots.store_identity import StoreIdentity
from megatron_moevement.runtime.stores.store import RingRole, StoreDirectory
from megatron_moevement.runtime.upstream_log.log import UpstreamLog, buffer_bytes
from megatron_moevement.strategies.moevement.protection.left_state import read_left_state
from megatron_moevement.strategies.moevement.protection.reserve import ReserveSizes, Room
from megatron_moevement.strategies.moevement.protection.resident_store import (
    ResidentStore,
    SparePlace,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where tests.harness is

from tests.harness.job_facts import Job, without_processes
from tests.harness.kept_spare import await_made
from tests.harness.one_schedule import one_schedule

WINDOW = 4
STEPS = 2 * WINDOW
PARTS = 50
TENSORS = 16
OWN, KEPT = LogicalRank(pp=0), LogicalRank(pp=1)
HOST = Host(0, "node", OWN)
IDENTITY = StoreIdentity("benchmark", "0123")


def fill_ring(ring: RingFile, slot_bytes: int) -> None:
    """Publishes two windows of slots."""
    size_bytes = slot_bytes // PARTS
    for step in range(STEPS):
        payload = ring.reserve(step)
        torch.frombuffer(payload, dtype=torch.uint8).fill_(step + 1)
        parts = tuple(
            SlotPart.of(f"op{i}", i * size_bytes, payload[i * size_bytes : (i + 1) * size_bytes])
            for i in range(PARTS)
        )
        window = Window(step - step % WINDOW, WINDOW, 0)
        ring.publish(SlotRecord(0, window, step % WINDOW, step, PARTS * size_bytes, parts))


def fill_log(log: UpstreamLog, step_bytes: int) -> None:
    """Logs as many steps as the rings hold."""
    like = torch.zeros(step_bytes // TENSORS, dtype=torch.uint8)
    for step in range(STEPS):
        log.begin_step(step)
        for number in range(TENSORS):
            tag = BoundaryTag(step, Direction.FORWARD, 0, 1, number)
            place = log.reserve(tag, like)
            assert place is not None
            place.fill_(number + 1)
            log.land(tag, place)
        log.end_step(step)


def seconds(do: Callable[[], object], repetitions: int) -> list[float]:
    """Returns how long each repetition takes."""
    taken = []
    for _ in range(repetitions):
        start_s = time.perf_counter()
        do()
        taken.append(time.perf_counter() - start_s)
    return taken


def plan() -> None:
    """Plans for a small job of which a rank is lost."""
    job = Job(Layout(pp=4, dp=2), step=STEPS + WINDOW - 1, window=WINDOW)
    facts: Facts = without_processes(job.facts(), {3})
    assert plan_recovery(facts).digest


def newcomer_s(root: Path, slot_bytes: int, step_bytes: int, *, waits: bool) -> float:
    """Returns how long a process takes for its files and its log once it has a rank."""
    ring = RingShape.equal(STEPS, slot_bytes, PARTS)
    kept = ResidentStore()
    if waits:
        kept.pin = lambda memory: lambda: None
        kept.hold(SparePlace(root, HOST.process, HOST.process + 1), IDENTITY)
        sizes = ReserveSizes(ring.total_bytes, STEPS * buffer_bytes(step_bytes), copies=1)
        kept.make_reserve(sizes, Room())
        if kept.reserve is not None:
            await_made(kept.reserve)
    start_s = time.perf_counter()
    store = kept.open(root, IDENTITY, HOST.process, OWN)
    for role, owner in ((RingRole.OWN, OWN), (RingRole.HELD, KEPT)):
        store.ring(role, owner, ring)
    log = UpstreamLog(max_steps=STEPS, step_bytes=step_bytes, reserve=kept.log_memory)
    taken_s = time.perf_counter() - start_s
    log.close()
    kept.finish()
    kept.close()
    return taken_s


def measure(root: Path, total_bytes: int, repetitions: int) -> dict[str, float]:
    """Makes the memory, and returns the figures."""
    slot_bytes = total_bytes // 4 // STEPS
    step_bytes = total_bytes // 2 // STEPS
    log = UpstreamLog(max_steps=STEPS, step_bytes=step_bytes + TENSORS * 512)
    with StoreDirectory(root, IDENTITY, HOST.process) as store:
        journal = store.journal(JournalShape(STEPS + 2, 1000, STEPS + 2))
        schedules = one_schedule(WINDOW)
        for step in range(1, STEPS):
            journal.commit(
                JournalState(0, schedules, step, Window(0, WINDOW, 0), OWN), step, b"entry", 1.0
            )
        for role, owner in ((RingRole.OWN, OWN), (RingRole.HELD, KEPT)):
            fill_ring(
                store.ring(role, owner, RingShape.equal(STEPS, slot_bytes, PARTS)), slot_bytes
            )
        fill_log(log, step_bytes)

        def facts(generation: int) -> None:
            found = read_left_state(store, HOST, generation)
            extents = log.extents()
            assert len(found.holdings) == 4
            assert len(extents[0].steps) == STEPS

        before = HASHED.total
        survivor = seconds(lambda: facts(1), repetitions)
        hashed_bytes = HASHED.total - before
        launch = seconds(lambda: facts(0), 1)
        planned = seconds(plan, repetitions)
        store.remove()
    log.close()
    newcomer = {
        waits: statistics.median(
            newcomer_s(root, slot_bytes, step_bytes, waits=waits) for _ in range(repetitions)
        )
        for waits in (True, False)
    }
    return {
        "bytes": total_bytes,
        "facts_s": statistics.median(survivor),
        "facts_slowest_s": max(survivor),
        "plan_s": statistics.median(planned),
        "plan_slowest_s": max(planned),
        "hashed_bytes": hashed_bytes,
        "launch_facts_s": launch[0],
        "newcomer_s": newcomer[True],
        "newcomer_without_wait_s": newcomer[False],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--bytes", nargs="+", type=float, default=[40e6, 4e9])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--store", type=Path, default=Path("/dev/shm"))
    args = parser.parse_args()
    for size in args.bytes:
        with tempfile.TemporaryDirectory(dir=args.store) as root:
            figures = measure(Path(root), int(size), args.repetitions)
        print(
            f"{figures['bytes'] / 1e9:.2f} GB: facts {figures['facts_s'] * 1e3:.2f} ms and plan "
            f"{figures['plan_s'] * 1e3:.2f} ms of a survivor, {figures['hashed_bytes']} bytes "
            f"hashed; facts of a launch {figures['launch_facts_s'] * 1e3:.0f} ms; files of a "
            f"newcomer {figures['newcomer_s'] * 1e3:.2f} ms, of one that has not waited "
            f"{figures['newcomer_without_wait_s'] * 1e3:.2f} ms"
        )
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
