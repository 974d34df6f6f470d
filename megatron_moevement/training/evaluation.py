# SPDX-License-Identifier: Apache-2.0
"""The loss on the validation split, computed without changing any state."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from megatron_moevement.integrations.megatron.random_state import (
    random_state,
    restore_random_state,
)
from megatron_moevement.runtime.interrupts.host_wait import await_on_host
from megatron_moevement.runtime.observation.watch import Watch, Work
from megatron_moevement.training.data.batches import SampleDataset
from megatron_moevement.training.job import Job
from megatron_moevement.training.micro_batch_source import MicroBatchSource


def evaluate(
    job: Job,
    dataset: SampleDataset,
    *,
    iterations: int,
    round_number: int,
    watch: Watch | None = None,
) -> float:
    """Returns the mean loss per token over some iterations; every rank calls it.

    The samples follow from the number of the round, so a repeated evaluation gives the same loss.

    Args:
        round_number: evaluations before this one.
    """
    before = random_state()
    samples = iterations * job.batches.global_batch_size
    losses: list[float] = []
    with MicroBatchSource(
        job, dataset, consumed_samples=round_number * samples, num_steps=iterations
    ) as source:
        watch = watch or Watch()
        watch.begin_evaluation()
        for _ in range(iterations):
            watch.begin_step(Work.EVALUATION)
            loss = job.schedule.forward(source.next_step())
            watch.end_step(Work.EVALUATION)
            if loss is not None:
                losses.append(loss.mean)
    restore_random_state(before)
    return _known_everywhere(sum(losses) / len(losses) if losses else -math.inf, job.device)


def _known_everywhere(loss: float, device: torch.device) -> float:
    value = torch.tensor([loss], dtype=torch.float64, device=device)
    await_on_host(dist.all_reduce(value, op=dist.ReduceOp.MAX, async_op=True))
    return float(value.item())
