# SPDX-License-Identifier: Apache-2.0
"""What the upstream log costs a step: with it and without, step by step in turn, in one job.

    .venv/bin/python benchmarks/upstream_log.py                       # two stages, two processes
    .venv/bin/python benchmarks/upstream_log.py --ranks 4 --expert-model-parallel-size 2

`inline` copies and hashes where a tensor is sent, `background` on a thread of its own. Each ratio
is the median over rounds of a step with the log by the step without it of the same round, by wall
time, and by the CPU time of all processes, which other programs on the machine disturb less. The
column of the writer is what it takes of the training thread of rank 0. Flags of
pretrain_moe.py are added to the defaults and win over them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_moevement.backends.backend import BackendName, choose, load

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where tests.harness is
backend = load(choose(None))
backend.install()  # before Megatron is imported

from megatron_moevement.integrations.megatron.boundary_log import LoggedCommunicator  # noqa: E402
from megatron_moevement.integrations.megatron.process_groups import leave_job  # noqa: E402
from megatron_moevement.policy.job.boundary import BoundaryTag  # noqa: E402
from megatron_moevement.runtime.coordination.commit_barrier import StopRequest  # noqa: E402
from megatron_moevement.runtime.coordination.progress import START  # noqa: E402
from megatron_moevement.runtime.upstream_log.log_writer import (  # noqa: E402
    BackgroundWriter,
    InlineWriter,
    LogWriter,
)
from megatron_moevement.settings.launch import Launch  # noqa: E402
from megatron_moevement.training.arguments import parse  # noqa: E402
from megatron_moevement.training.job import Job, build_job  # noqa: E402
from megatron_moevement.training.step import TrainStep  # noqa: E402
from megatron_moevement.training.steps import build_datasets, open_steps  # noqa: E402
from tests.harness.boundary_run import open_log  # noqa: E402

TINY = (
    "--model-preset=tiny",
    "--pipeline-model-parallel-size=2",
    "--vocab-size=1024",
    "--mock-data",
    "--tokenizer-type=NullTokenizer",
    "--micro-batch-size=4",
    "--global-batch-size=32",
    "--train-iters=1000",
    "--lr=1e-4",
    "--eval-iters=0",
    "--num-workers=0",
    "--bf16",
)
OFF = "off"
RETAINED_STEPS = 8
WARM_UP = 2


class TimedWriter(LogWriter):
    """Measures what a writer takes of the training thread."""

    def __init__(self, writer: LogWriter) -> None:
        super().__init__(writer.log)
        self.taken_s = 0.0
        self._writer = writer

    @property
    def spent_s(self) -> float:
        return self._writer.spent_s

    def await_landed(self) -> timedelta:
        return self._writer.await_landed()

    def sent(self, tag: BoundaryTag, tensor: torch.Tensor) -> None:
        started_s = time.thread_time()
        self._writer.sent(tag, tensor)
        self.taken_s += time.thread_time() - started_s

    def received(self, tag: BoundaryTag, tensor: torch.Tensor) -> None:
        started_s = time.thread_time()
        self._writer.received(tag, tensor)
        self.taken_s += time.thread_time() - started_s


def start_ranks(number: int) -> int:
    """Starts this program once for each rank; returns the worst exit code."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fixed = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(number)}
    fixed |= {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": str(number)}
    ranks = [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env={**os.environ, **fixed, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(number)
    ]
    return max(abs(rank.wait()) for rank in ranks)


def measure(rounds: int, flags: list[str]) -> None:
    """Trains; rank 0 prints the table."""
    torch.set_num_threads(1)
    launch = Launch.from_environment()
    arguments = parse((*TINY, *flags), launch.world_size)
    job = build_job(arguments, launch, backend)
    logs = {kind: open_log(job, RETAINED_STEPS) for kind in ("inline", "background")}
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in (OFF, *logs)}
    with contextlib.ExitStack() as stack:
        step = stack.enter_context(open_steps(job, build_datasets(job), START))
        background = BackgroundWriter(logs["background"], backend.copy_stream())
        writers: dict[str, LogWriter] = {"background": stack.enter_context(background)}
        if backend.name is BackendName.CPU:
            writers["inline"] = InlineWriter(logs["inline"])
        timed = {kind: TimedWriter(writer) for kind, writer in writers.items()}
        communicators = {
            kind: LoggedCommunicator(job.groups.pp, job.chunks[0].config, writer)
            for kind, writer in timed.items()
        }
        for number in range(rounds + WARM_UP):
            for kind in (OFF, *communicators):
                spent = timed_step(job, step, communicators.get(kind))
                if number >= WARM_UP:
                    times[kind].append(spent)
    if dist.get_rank() == 0:
        sys.stdout.write(table(times, timed))
    leave_job()


def timed_step(
    job: Job, step: TrainStep, communicator: LoggedCommunicator | None
) -> tuple[float, float]:
    """Trains a step; returns wall time of this rank and CPU time of all."""
    dist.barrier()
    backend.synchronize()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    if communicator is None:
        step.run(StopRequest.NONE)
    else:
        communicator.writer.log.drop_before(step.progress.committed - RETAINED_STEPS + 2)
        with job.schedule.communicating_by(communicator):
            step.run(StopRequest.NONE)
        communicator.writer.await_landed()
    backend.synchronize()
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    total = torch.tensor([cpu_s], dtype=torch.float64, device=job.device)
    dist.all_reduce(total)
    return wall_s, float(total.item())


def table(
    times: Mapping[str, Sequence[tuple[float, float]]], writers: Mapping[str, TimedWriter]
) -> str:
    """Returns medians and ratios."""
    lines = [
        "| log | step (ms) | wall ratio | CPU ratio | quartiles | writer, CPU ms a step | bytes |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for kind, spent in times.items():
        if not spent:
            continue
        wall, cpu = (
            [one[i] / off[i] for one, off in zip(spent, times[OFF], strict=True)] for i in (0, 1)
        )
        low, _, high = statistics.quantiles(cpu, n=4) if kind != OFF else (1.0, 1.0, 1.0)
        log = writers[kind].log if kind != OFF else None
        used = f"{log.used_bytes / len(log.steps):,.0f}" if log else "0"
        own_s = writers[kind].taken_s / (len(spent) + WARM_UP) if log else 0.0
        lines.append(
            f"| {kind} | {statistics.median(one[0] for one in spent) * 1e3:.1f} "
            f"| {statistics.median(wall):.3f} | {statistics.median(cpu):.4f} "
            f"| {low:.3f} to {high:.3f} | {own_s * 1e3:.2f} | {used} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=30, help="timed steps of each kind")
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    options, flags = parser.parse_known_args()
    if "RANK" not in os.environ:
        return start_ranks(options.ranks)
    measure(options.rounds, flags)
    return 0


if __name__ == "__main__":
    sys.exit(main())
