# SPDX-License-Identifier: Apache-2.0
"""The digest of a state holds all that decides later bits, besides tensors, too."""

import dataclasses
import random

import numpy as np
import pytest
import torch

from megatron_moevement.runtime.coordination.progress import Progress
from tests.harness.tiny_job import tiny_job

FLAGS = ("--fp16", "--initial-loss-scale=1024", "--hysteresis=3", "--loss-scale-window=100")
PROGRESS = Progress(committed=5, consumed_samples=60, skipped=1)


def change_progress(job, progress):
    """Changes each number of it in turn."""
    for field in dataclasses.fields(progress):
        progress = dataclasses.replace(progress, **{field.name: getattr(progress, field.name) + 1})
        yield field.name, progress


def change_scalers(job, progress):
    """Changes each number of each optimizer's loss scaler in turn."""
    for part, state in enumerate(job.optimizer.scalers()):
        for name in state:
            states = [dict(one) for one in job.optimizer.scalers()]
            states[part][name] += 1
            job.optimizer.load_scalers(states)
            yield f"{name} of part {part}", progress


def change_streams(job, progress):
    """Draws from each random stream in turn."""
    from megatron.core import tensor_parallel  # noqa: PLC0415

    for name, draw in (
        ("python", random.random),
        ("numpy", np.random.rand),
        ("host", one_of_torch),
    ):
        draw()
        yield name, progress
    tracker = tensor_parallel.get_cuda_rng_tracker()
    for name in tracker.get_states():
        with tracker.fork(name):
            one_of_torch()
        yield name, progress


def one_of_torch():
    torch.rand(1)


def change_schedule(job, progress):
    """Moves on in the schedules of learning rate and weight decay."""
    job.scheduler.go_on_at({"num_steps": 24})
    yield "num_steps", progress


def change_adam_step(job, progress):
    """Changes the step of all parameters, which operators count, too."""
    job.optimizer.set_adam_step(4)
    yield "adam_step", progress


def digests_of_changes():
    """Returns for each change whether it changed the digest of the scalars, and of operators."""
    from megatron_moevement.training.state_digest import state_digests  # noqa: PLC0415

    found = {}
    with tiny_job(*FLAGS) as job:
        before = state_digests(job, PROGRESS)
        assert before == state_digests(job, PROGRESS)
        for change in (
            change_progress,
            change_scalers,
            change_streams,
            change_schedule,
            change_adam_step,
        ):
            for name, now in change(job, PROGRESS):
                after = state_digests(job, now)
                differ = {key for key in before if before[key] != after[key]}
                found[name] = ["scalars" in differ, bool(differ - {"scalars"})]
                before = after
            before = state_digests(job, PROGRESS)
    return found


@pytest.mark.distributed
def test_each_scalar_changes_the_digest_of_the_scalars_and_of_nothing_else(megatron_fork_server):
    (found,) = megatron_fork_server.run(digests_of_changes, world_size=1).check().values
    assert found.pop("adam_step") == [True, True]  # each operator counts it besides
    assert {name: one for name, one in found.items() if one != [True, False]} == {}
    assert {
        *("committed", "consumed_samples", "skipped", "num_steps", "python", "numpy", "host"),
        *("model-parallel-rng", "data-parallel-rng", "expert-parallel-rng"),
        *("scale of part 0", "growth_tracker of part 0", "hysteresis_tracker of part 0"),
    } <= set(found)
