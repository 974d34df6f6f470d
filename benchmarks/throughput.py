# SPDX-License-Identifier: Apache-2.0
"""Tokens per second and peak memory of one process, by default of a 1B-parameter MoE in BF16.

    .venv/bin/python benchmarks/throughput.py                                  # with a GPU
    .venv/bin/python benchmarks/throughput.py --iterations 5 --model-preset tiny --seq-length 128

Flags of pretrain_moe.py are added to the defaults and win over them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from megatron_moevement.backends.backend import choose, load

backend = load(choose(None))
backend.install()  # before Megatron is imported

from megatron_moevement.integrations.megatron.process_groups import leave_job  # noqa: E402
from megatron_moevement.runtime.coordination.commit_barrier import StopRequest  # noqa: E402
from megatron_moevement.runtime.coordination.progress import START  # noqa: E402
from megatron_moevement.settings.launch import Launch  # noqa: E402
from megatron_moevement.training.arguments import parse  # noqa: E402
from megatron_moevement.training.job import build_job  # noqa: E402
from megatron_moevement.training.steps import build_datasets, open_steps  # noqa: E402

ONE_BILLION = (
    "--model-preset=qwen-moe",  # its layers, at a third of their number and fewer experts
    "--num-layers=8",
    "--num-experts=16",
    "--moe-router-topk=4",
    "--vocab-size=32000",
    "--seq-length=2048",
    "--moe-grouped-gemm",
    "--bf16",
    "--recompute-granularity=selective",
    "--mock-data",
    "--tokenizer-type=NullTokenizer",
    "--micro-batch-size=4",
    "--global-batch-size=16",
    "--train-iters=1000",
    "--lr=1e-4",
    "--eval-iters=0",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--iterations", type=int, default=30, help="timed iterations, after three")
    options, flags = parser.parse_known_args()
    arguments = parse((*ONE_BILLION, *flags), 1)
    job = build_job(arguments, Launch(rank=0, local_rank=0, world_size=1), backend)
    parameters = sum(p.numel() for chunk in job.chunks for p in chunk.parameters())
    durations_s = []
    with open_steps(job, build_datasets(job), START) as step:
        for _ in range(3 + options.iterations):
            backend.synchronize()
            started_s = time.perf_counter()
            step.run(StopRequest.NONE)
            backend.synchronize()
            durations_s.append(time.perf_counter() - started_s)
    leave_job()
    typical_s = statistics.median(durations_s[3:])
    tokens = job.batches.global_batch_size * arguments.data.seq_length
    sys.stdout.write(
        f"{backend.name.value}: {parameters / 1e9:.3f} B parameters, "
        f"{tokens / typical_s:,.0f} tokens/s ({typical_s * 1e3:.1f} ms an iteration, "
        f"{min(durations_s[3:]) * 1e3:.1f} to {max(durations_s[3:]) * 1e3:.1f}), "
        f"peak memory {backend.peak_memory_bytes() / 2**30:.2f} GiB\n"
    )


if __name__ == "__main__":
    main()
