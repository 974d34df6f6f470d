"""Our loop against Megatron-Core's public API used directly: same losses, ratio of iteration times.

    .venv/bin/python benchmarks/training_loop.py [--blocks 12] [--iterations 10]

Both train the same model from the same seed on the same data in one process, in blocks that take
turns, so that whatever else the machine does hits both alike.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

from megatron_moevement.backends.backend import choose, load

backend = load(choose(None))
backend.install()  # before Megatron is imported

from megatron_direct import ITERS, LR, MICRO_BATCH, MICRO_BATCHES, SEQ, Direct  # noqa: E402

from megatron_moevement.integrations.megatron.process_groups import leave_job  # noqa: E402
from megatron_moevement.runtime.progress import START  # noqa: E402
from megatron_moevement.settings.launch import Launch  # noqa: E402
from megatron_moevement.strategies.strategy import Off  # noqa: E402
from megatron_moevement.training.arguments import parse  # noqa: E402
from megatron_moevement.training.data.batches import MicroBatches  # noqa: E402
from megatron_moevement.training.job import build_job  # noqa: E402
from megatron_moevement.training.loop import TrainingLoop, open_reporter  # noqa: E402
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=12, help="blocks of each side")
    parser.add_argument("--iterations", type=int, default=10, help="iterations of a block")
    options = parser.parse_args()
    job = build_job(parse(FLAGS, 1), Launch(rank=0, local_rank=0, world_size=1), backend)
    datasets = build_datasets(job)
    fetch = MicroBatches(datasets.train, job.batches, 0, job.arguments.data.vocab_size)
    direct = Direct(job.arguments.run.seed)
    ours_s: list[float] = []
    theirs_s: list[float] = []
    theirs: list[float] = []
    ratios: list[float] = []
    with open_reporter(job) as reporter, open_steps(job, datasets, START) as step:
        loop = TrainingLoop(job, reporter, datasets, step, StopSources(None), strategy=Off())
        for block in range(options.blocks):
            gc.collect()
            for side in ("ours", "theirs") if block % 2 else ("theirs", "ours"):
                for _ in range(options.iterations):
                    started_s = time.perf_counter()
                    if side == "ours":
                        loop.iterate()
                        ours_s.append(time.perf_counter() - started_s)
                    else:
                        consumed = len(theirs) * job.batches.global_batch_size
                        theirs.append(direct.step(fetch.step(consumed)))
                        theirs_s.append(time.perf_counter() - started_s)
            n = options.iterations
            ratios.append(statistics.median(ours_s[-n:]) / statistics.median(theirs_s[-n:]))
        ours = [job.ledger.losses()[step] for step in range(1, len(theirs) + 1)]
    leave_job()
    equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
    print(f"losses equal, bit for bit: {equal} of {len(theirs)} iterations")
    print(
        f"median iteration: ours {statistics.median(ours_s) * 1e3:.2f} ms, "
        f"Megatron-Core directly {statistics.median(theirs_s) * 1e3:.2f} ms, "
        f"ratio {statistics.median(ours_s) / statistics.median(theirs_s):.4f} "
        f"(blocks: {min(ratios):.3f} to {max(ratios):.3f})"
    )


if __name__ == "__main__":
    main()
