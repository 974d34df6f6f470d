# SPDX-License-Identifier: Apache-2.0
"""The steps of a job from some point on: its data sets, and a `TrainStep` that reads them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import torch.distributed as dist

from megatron_moevement.integrations.megatron.datasets import Datasets, IndexRole
from megatron_moevement.runtime.coordination.agreement import all_gather_json
from megatron_moevement.runtime.coordination.generation import Generation
from megatron_moevement.runtime.coordination.progress import Progress
from megatron_moevement.strategies.strategy import Strategy
from megatron_moevement.training.data.splits import build_splits, count_samples
from megatron_moevement.training.job import Job
from megatron_moevement.training.micro_batch_source import MicroBatchSource
from megatron_moevement.training.step import TrainStep


def build_datasets(job: Job) -> Datasets:
    """Builds the data sets: one rank of each machine the index files, then all read them."""
    run = job.arguments.run
    # By name: the process with number 0 on a machine may be lost, or wait as a spare.
    machines = all_gather_json(socket.gethostname(), job.device)
    is_first = machines.index(machines[dist.get_rank()]) == dist.get_rank()
    samples = count_samples(
        train_iters=int(run.train_iters or 0),
        eval_interval=run.eval_interval,
        eval_iters=run.eval_iters,
        global_batch_size=job.batches.global_batch_size,
    )
    return build_splits(
        job.arguments.data,
        samples,
        seed=run.seed,
        role=IndexRole.BUILDER if is_first else IndexRole.READER,
        barrier=dist.barrier,
    )


@contextlib.contextmanager
def open_steps(
    job: Job,
    datasets: Datasets,
    start: Progress,
    strategy: Strategy | None = None,
    generation: Generation | None = None,
) -> Iterator[TrainStep]:
    """Yields the step that trains from `start`; its data threads end with the block."""
    own = generation or Generation()

    def open_source() -> MicroBatchSource:
        return MicroBatchSource(
            job,
            datasets.train,
            consumed_samples=start.consumed_samples,
            num_steps=int(job.arguments.run.train_iters or 0) - start.committed,
        )

    with own.own(open_source) as source:
        yield TrainStep(
            schedule=job.schedule,
            optimizer=job.optimizer,
            expert_bias=job.expert_bias,
            barrier=job.barrier,
            commit=job.commit,
            micro_batches=source.next_step,
            progress=start,
            strategy=strategy or Strategy(),
            uninterrupted=own.uninterrupted,
            confirm=own.confirm,
            faults=job.faults,
        )
