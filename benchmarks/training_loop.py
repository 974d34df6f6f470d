# SPDX-License-Identifier: Apache-2.0
"""Our loop against Megatron-Core's public API used directly: same losses, ratio of iteration times.

    .venv/bin/python benchmarks/training_loop.py [--blocks 12] [--iterations 10] [--limit 1.03]

Both train the same model from the same seed on the same data in one process, in blocks that take
turns, so that whatever else the machine does hits both alike. They share the backend (on the CPU it
rewrites Megatron's code for the GPU), Megatron's process groups and what fetches batches; all else
of the other side is Megatron-Core's public API. Exit code 1: a loss differs, or the ratio of the
medians is over the limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import sys
import time
from collections.abc import Sequence

from megatron_moevement.backends.backend import choose, load

backend = load(choose(None))
backend.install()  # before Megatron is imported

from megatron_direct import ITERS, LR, MICRO_BATCH, MICRO_BATCHES, SEQ, Direct  # noqa: E402

from megatron_moevement.integrations.megatron.process_groups import leave_job  # noqa: E402
from megatron_moevement.runtime.coordination.generation import Generation  # noqa: E402
from megatron_moevement.runtime.coordination.progress import START  # noqa: E402
from megatron_moevement.settings.launch import Launch  # noqa: E402
from megatron_moevement.strategies.strategy import Strategy  # noqa: E402
from megatron_moevement.training.arguments import parse  # noqa: E402
from megatron_moevement.training.data.batches import MicroBatches  # noqa: E402
from megatron_moevement.training.job import build_job  # noqa: E402
from megatron_moevement.training.loop import TrainingLoop  # noqa: E402
from megatron_moevement.training.reported_job import open_reporter  # noqa: E402
from megatron_moevement.training.steps import build_datasets, open_steps  # noqa: E402
from megatron_moevement.training.stop_request import StopSources  # noqa: E402

FLAGS = (
    "--model-preset=tiny",
    "--mock-data",
    "--tokenizer-type=NullTokenizer",
    "--vocab-size=319",
    f"--seq-length={SEQ}",
    f"--micro-batch-size={MICRO_BATCH}",
    f"--global-batch-size={MICRO_BATCH * MICRO_BATCHES}",
    f"--train-iters={ITERS}",
    f"--lr={LR}",
    "--eval-iters=0",
    "--num-workers=0",
    "--log-interval=100",
    "--seed=1234",
)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Losses of each iteration, and medians of their times, of our loop and of Megatron-Core's."""

    ours: list[float]
    theirs: list[float]
    ours_s: float
    theirs_s: float
    ratios: list[float]
    """Of the medians of each block."""

    @property
    def ratio(self) -> float:
        return self.ours_s / self.theirs_s

    @property
    def different(self) -> list[int]:
        """Iterations whose losses differ."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return [step for step, (a, b) in enumerate(pairs, start=1) if a != b]

    def complaints(self, limit: float) -> list[str]:
        """Returns what is not as it should be, each in a line."""
        different, found = self.different, []
        if different:
            found.append(
                f"the losses of {len(different)} iterations differ, iteration {different[0]} first"
            )
        if not self.ratio <= limit:
            found.append(f"the ratio of medians is {self.ratio:.4f}, over the limit of {limit}")
        return found


def compare(blocks: int, iterations: int) -> Comparison:
    """Trains both sides, in blocks that take turns."""
    job = build_job(parse(FLAGS, 1), Launch(rank=0, local_rank=0, world_size=1), backend)
    datasets = build_datasets(job)
    fetch = MicroBatches(datasets.train, job.batches, 0, job.arguments.data.vocab_size)
    direct = Direct(job.arguments.run.seed)
    ours_s: list[float] = []
    theirs_s: list[float] = []
    theirs: list[float] = []
    ratios: list[float] = []
    with open_reporter(job) as reporter, open_steps(job, datasets, START) as step:
        loop = TrainingLoop(
            *(job, reporter, datasets, step, StopSources(None)),
            strategy=Strategy(),
            generation=Generation(),
        )
        for block in range(blocks):
            gc.collect()
            for side in ("ours", "theirs") if block % 2 else ("theirs", "ours"):
                for _ in range(iterations):
                    started_s = time.perf_counter()
                    if side == "ours":
                        loop.iterate()
                        ours_s.append(time.perf_counter() - started_s)
                    else:
                        consumed = len(theirs) * job.batches.global_batch_size
                        theirs.append(direct.step(fetch.step(consumed)))
                        theirs_s.append(time.perf_counter() - started_s)
            n = iterations
            ratios.append(statistics.median(ours_s[-n:]) / statistics.median(theirs_s[-n:]))
        ours = [job.ledger.losses()[step] for step in range(1, len(theirs) + 1)]
    leave_job()
    medians_s = statistics.median(ours_s), statistics.median(theirs_s)
    return Comparison(ours, theirs, *medians_s, ratios)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=12, help="blocks of each side")
    parser.add_argument("--iterations", type=int, default=10, help="iterations of a block")
    parser.add_argument("--limit", type=float, default=1.03, help="of the ratio of medians")
    options = parser.parse_args(argv)
    found = compare(options.blocks, options.iterations)
    count = len(found.theirs)
    print(f"losses equal, bit for bit: {count - len(found.different)} of {count} iterations")
    print(
        f"median iteration: ours {found.ours_s * 1e3:.2f} ms, "
        f"Megatron-Core directly {found.theirs_s * 1e3:.2f} ms, ratio {found.ratio:.4f} "
        f"(blocks: {min(found.ratios):.3f} to {max(found.ratios):.3f})"
    )
    complaints = found.complaints(options.limit)
    if complaints:
        print(f"fails: {'; '.join(complaints)}")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
