# SPDX-License-Identifier: Apache-2.0
"""Feeds readers and servers random and mutated bytes: none may fail in a way that it does not name.

    .venv/bin/python -m tests.harness.fuzz --seconds 600 --first 1

Prints for each target how many inputs it took. What failed otherwise is shown with its seed, which
draws it again: `--first SEED --seconds 0`. Ends with 1 then.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from megatron_moevement.errors import UserError
from megatron_moevement.policy.copies.journal_state import JournalState
from megatron_moevement.policy.facts.facts_document import load_facts
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.observation.events import EventLog, EventName, read_events
from megatron_moevement.runtime.security.seal import BrokenSealError, Seal
from megatron_moevement.runtime.slots.journal import Journal, JournalShape
from megatron_moevement.runtime.slots.ring_file import RingFile, RingShape
from megatron_moevement.runtime.slots.slot_record import SlotPart, SlotRecord
from megatron_moevement.runtime.slots.store_identity import (
    RUN_NAME,
    DamagedFileError,
    StoreIdentity,
)
from megatron_moevement.runtime.stores.fault_record import FaultRecord
from megatron_moevement.runtime.stores.run_record import read_run
from tests.harness.fuzz_bytes import mutated, mutated_document
from tests.harness.fuzz_peers import Peers
from tests.harness.one_schedule import one_schedule

Feed = Callable[[Random], None]
IDENTITY = StoreIdentity("run-1", "0123abcd")
_OWNER = LogicalRank()
_FACTS = {
    "layout": {"pp": 2},
    "ends": "INDEPENDENT",
    "durable": 3,
    "processes": [
        {
            "process": 0,
            "rank": "pp0.dp0.tp0.cp0.ep0",
            "domain": "a",
            "committed": 7,
            "live": {"condition": "DENSE", "step": 7},
            "persisted": {"start": 3, "size": 2},
            "holdings": [
                {
                    "owner": "pp1.dp0.tp0.cp0.ep0",
                    "window": {"start": 3, "size": 2},
                    "slots": [0, 1],
                }
            ],
            "ledger": [3, 7],
        },
    ],
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """An input that a target took badly: the seed draws it again."""

    target: str
    seed: int
    failure: str


@contextlib.contextmanager
def targets(folder: Path) -> Iterator[dict[str, Feed]]:
    """Yields what takes bytes from outside, by name; each raises what is wrong with it.

    Args:
        folder: an empty one.
    """
    with Peers(folder) as peers:
        yield {
            "replication: callers": peers.feed_caller,
            "replication: requests": peers.feed_request,
            "replication: answers": peers.feed_answer,
            "journal": _file_target(folder / "journal", _make_journal, _read_journal),
            "ring": _file_target(folder / "ring", _make_ring, _read_ring),
            "events": _events_target(folder / "events"),
            "faults": _faults_target(folder / "faults"),
            "facts": _feed_facts,
            "run record": _run_target(folder / "run"),
            "control store": _feed_seal,
        }


def fuzz(seed: int, feeds: dict[str, Feed], counts: Counter[str]) -> list[Finding]:
    """Feeds each target an input drawn from a seed; returns what was wrong."""
    found = []
    for name, feed in feeds.items():
        try:
            feed(Random(f"{seed} {name}"))  # noqa: S311  (no secret)
        except Exception:  # noqa: BLE001  (whatever it is, it is a finding)
            found.append(Finding(name, seed, traceback.format_exc()))
        counts[name] += 1
    return found


def _file_target(path: Path, make: Callable[[Path], None], read: Callable[[Path], None]) -> Feed:
    make(path)
    good = path.read_bytes()

    def feed(random: Random) -> None:
        path.write_bytes(mutated(random, [good]))
        with contextlib.suppress(DamagedFileError, UserError):
            read(path)

    return feed


def _make_journal(path: Path) -> None:
    with contextlib.closing(Journal.create(path, IDENTITY, JournalShape(4, 40, 20))) as journal:
        for step in range(1, 6):
            state = JournalState(1, one_schedule(2), step, Window(0, 2, 0), _OWNER)
            journal.commit(state, step, b"entry" * step, 1.5)


def _read_journal(path: Path) -> None:
    with contextlib.closing(Journal.open(path, IDENTITY)) as journal:
        _ = journal.state
        journal.losses()
        for step in journal.entries():
            with contextlib.suppress(KeyError):
                journal.entry(step)


def _make_ring(path: Path) -> None:
    created = RingFile.create(path, IDENTITY, _OWNER, RingShape.equal(3, 500, 2))
    with contextlib.closing(created) as ring:
        for step in range(3):
            part = SlotPart.of("head", 0, ring.reserve(step)[:400])
            ring.publish(SlotRecord(0, Window(0, 3), step, step, 400, (part,)))


def _read_ring(path: Path) -> None:
    with contextlib.closing(RingFile.open(path, IDENTITY)) as ring:
        for record in ring.records():
            ring.damaged_parts(record)
            ring.payload(record).release()


def _events_target(folder: Path) -> Feed:
    with EventLog(folder, 0, 0) as events:
        events.emit(EventName.PLAN, 3, verdict="GLOBAL", scope=[1, 2])
    (path,) = folder.iterdir()
    good = path.read_bytes()

    def feed(random: Random) -> None:
        other = json.dumps(mutated_document(random, json.loads(good))).encode()
        path.write_bytes(mutated(random, [good * 3, other]) if random.random() < 0.7 else other)
        with contextlib.suppress(ValueError):
            read_events(folder)

    return feed


def _faults_target(root: Path) -> Feed:
    record = FaultRecord(root, "run", 0)
    record.begin(1.5)
    record.note("kill:3:commit@1")
    record.close()
    path = record.folder / "rank-0"
    good = path.read_bytes()

    def feed(random: Random) -> None:
        path.write_bytes(mutated(random, [good, b"3\n", b"[]\n", b"null\n"]))
        again = FaultRecord(root, "run", 1)
        try:
            again.read()
        finally:
            again.close()

    return feed


def _run_target(folder: Path) -> Feed:
    folder.mkdir()

    def feed(random: Random) -> None:
        document = {"deciding": "ab", "layout": {"pp": 2}, "shown": {"a": "b"}}
        text = json.dumps(mutated_document(random, document)).encode()
        (folder / RUN_NAME).write_bytes(mutated(random, [text]))
        read_run(folder)

    return feed


def _feed_facts(random: Random) -> None:
    text = json.dumps(mutated_document(random, _FACTS))
    if random.random() < 0.5:
        text = mutated(random, [text.encode()]).decode(errors="replace")
    with contextlib.suppress(UserError):
        load_facts(text, "facts")


def _feed_seal(random: Random) -> None:
    seal = Seal(b"the key of this job and no other")
    good = seal.close("1/state_0", {"rank": 0, "world_size": 2}).encode()
    data = mutated(random, [good])
    if data == good:
        return
    try:
        seal.open("1/state_0", data)
    except BrokenSealError:
        return
    raise AssertionError(f"{data!r} was taken for a sealed document")


def main() -> int:
    """Fuzzes for a time; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default: 60)")
    parser.add_argument("--first", type=int, default=1, metavar="SEED", help="default: 1")
    args = parser.parse_args()
    logging.disable()
    counts: Counter[str] = Counter()
    findings: list[Finding] = []
    until_s, seed = time.monotonic() + args.seconds, args.first
    with tempfile.TemporaryDirectory() as name, targets(Path(name)) as feeds:
        while True:
            findings += fuzz(seed, feeds, counts)
            seed += 1
            if time.monotonic() >= until_s:
                break
    for finding in findings:
        sys.stdout.write(f"{finding.target}, seed {finding.seed}:\n{finding.failure}\n")
    for target, count in counts.items():
        wrong = sum(finding.target == target for finding in findings)
        sys.stdout.write(f"{target}: {count} inputs, {wrong} wrong\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
