# SPDX-License-Identifier: Apache-2.0
"""What a recovery costs each rank before anything moves, from 64 to 16,384 ranks, on one core.

Run `python benchmarks/scale.py`. A node of eight is lost; one of its ranks (a newcomer) and one
that has survived do what a job has them do from the first agreement of the new generation to the
last one before slots move, with the functions of the product. The other ranks do not exist: what
they tell is there before (`tests/harness/one_of_many.py`). Times are of the process (CPU seconds),
the median of the repetitions, at each number of ranks N and at 2 N. Memory is the most that Python
holds of what the rank makes, and the largest tensor. A limit that is exceeded is an error.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
import statistics
import sys
import time
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where tests.harness is

from tests.harness.one_of_many import OneOfMany, one_of_many
from tests.harness.scaled_recovery import Kind, ScaledRecovery

MAX_RATIO = 2.3
"""The most that twice the ranks may take."""
MAX_SECONDS = {1024: 0.3, 16_384: 5.0}
MAX_MB = 300


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one rank spends.

    Attributes:
        seconds: of each part.
    """

    seconds: Mapping[str, float]
    peak_mb: float

    @property
    def total_s(self) -> float:
        """All parts together."""
        return sum(self.seconds.values())


def measure(ranks: int, kind: Kind, repetitions: int) -> Cost:
    """Returns what one rank of a job spends."""
    recovery = ScaledRecovery(ranks, kind)
    with one_of_many(ranks, recovery.number) as group:
        run_once(recovery, group)  # what the others send is ready from now on
        gc.collect()  # what the benchmark itself holds is not the rank's to look through
        gc.freeze()
        try:
            runs = [run_once(recovery, group) for _ in range(repetitions)]
            seconds = {
                part: statistics.median(run[part] for run in runs) for part in recovery.names
            }
            tracemalloc.start()
            run_once(recovery, group)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        finally:
            gc.unfreeze()
    return Cost(seconds, (peak + group.largest_bytes) / 1e6)


def run_once(recovery: ScaledRecovery, group: OneOfMany) -> Mapping[str, float]:
    """Returns the CPU seconds of each part; nothing is left of an earlier run."""
    recovery.forget()
    gc.collect()
    seconds = {}
    for part, act in recovery.parts(group):
        start_s = time.process_time()
        act()
        seconds[part] = time.process_time() - start_s
    return seconds


def show(kind: Kind, costs: Mapping[int, Cost], sizes: Sequence[int]) -> Table:
    """Returns a table: a column for each number of ranks."""
    table = Table(title=f"one {kind.value}: CPU seconds", box=None)
    table.add_column("ranks")
    for ranks in sizes:
        table.add_column(f"{ranks:,}", justify="right")
    for part in costs[sizes[0]].seconds:
        table.add_row(part, *(f"{costs[ranks].seconds[part]:.3f}" for ranks in sizes))
    table.add_row("sum", *(f"{costs[ranks].total_s:.3f}" for ranks in sizes))
    table.add_row("below", *(f"{MAX_SECONDS[n]:.3f}" if n in MAX_SECONDS else "" for n in sizes))
    ratios = (costs[2 * ranks].total_s / costs[ranks].total_s for ranks in sizes)
    table.add_row(f"t(2N)/t(N), below {MAX_RATIO}", *(f"{ratio:.2f}" for ratio in ratios))
    table.add_row(f"MB, below {MAX_MB}", *(f"{costs[ranks].peak_mb:.0f}" for ranks in sizes))
    return table


def exceeded(kind: Kind, costs: Mapping[int, Cost], sizes: Sequence[int]) -> Iterator[str]:
    """Yields the limits that are not kept, each with what was measured."""
    for ranks in sizes:
        cost, most_s = costs[ranks], MAX_SECONDS.get(ranks, math.inf)
        ratio = costs[2 * ranks].total_s / cost.total_s
        measured = (
            (cost.total_s, most_s, "CPU seconds"),
            (ratio, MAX_RATIO, "times as long with twice the ranks"),
            (cost.peak_mb, MAX_MB, "MB"),
        )
        for value, limit, what in measured:
            if value >= limit:
                yield f"one {kind.value} of {ranks:,} ranks: {value:.2f} {what}, limit {limit}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512, 1024, 16_384])
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = sorted({*args.ranks})
    failures: list[str] = []
    for kind in Kind:
        costs = {
            ranks: measure(ranks, kind, args.repetitions)
            for ranks in sorted({*sizes, *(2 * ranks for ranks in sizes)})
        }
        Console(width=120).print(show(kind, costs, sizes))
        failures += exceeded(kind, costs, sizes)
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
