# SPDX-License-Identifier: Apache-2.0
"""Times the first answer of the metrics of a job with a long history, and the one after it.

.venv/bin/python benchmarks/first_scrape.py --ranks 1024 --steps 100
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from megatron_moevement.policy.accounting.event import EventName, EventRecord
from megatron_moevement.runtime.observation.event_file import line_of
from megatron_moevement.runtime.observation.metrics_server import JobCollector

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where tests.harness is

from tests.harness.synthetic_steps import step_fields

BEGUN_S = 1_790_000_000.0


def write_history(folder: Path, ranks: int, steps: int) -> None:
    """Writes a file for each rank with an event for each of its steps, of a second each."""
    random = Random(1)
    for rank in range(ranks):
        lines = []
        for step in range(1, steps + 1):
            ended_s = BEGUN_S + step
            fields = step_fields(step, rank, 0.9, ended_s, random)
            place = (ended_s + rank * 1e-6, rank, 4000 + rank, 0, step)
            lines.append(line_of(EventRecord(*place, EventName.ITERATION, fields)))
        (folder / f"node-{rank}.jsonl").write_text("".join(lines), "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # as who hosts the stores does
    with tempfile.TemporaryDirectory() as folder:
        write_history(Path(folder), args.ranks, args.steps)
        collector = JobCollector(Path(folder))
        for name in ("first answer", "answer without news"):
            began, began_cpu = time.perf_counter(), time.process_time()
            list(collector.collect())
            took_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
            print(f"{args.ranks * args.steps:,} events: {name} {took_s:.3f} s, CPU {cpu_s:.3f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
