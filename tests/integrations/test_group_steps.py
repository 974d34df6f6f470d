# SPDX-License-Identifier: Apache-2.0
"""Optimizers that count steps per group: the count is there from the start, and replays set it."""

import pytest
import torch

from megatron_moevement.policy.job.operators import OperatorKind
from megatron_moevement.runtime.coordination.commit_barrier import StopRequest
from megatron_moevement.runtime.coordination.progress import START
from tests.harness.default_run import slow_but
from tests.harness.tiny_job import tiny_job

JOBS = {
    "fp32": (1, ""),
    "ep2-sharded-bf16": (
        2,
        "--expert-model-parallel-size=2 --use-distributed-optimizer --bf16",
    ),
}
"""In the second the experts have an optimizer of their own, all of which may be frozen."""


def counts(job):
    """Returns what the inventory says of all step counters."""
    from megatron_moevement.integrations.megatron.inventory import (  # noqa: PLC0415
        operator_states,
    )

    states = operator_states(job.chunks, job.optimizer)
    return sorted(
        {
            value
            for state in states
            for name, value in state.optimizer.items()
            if name.endswith(".step")
        }
    )


def count_before_the_first_step(flags):
    """Returns the counts of a new job, and those after a replay has set them."""
    from megatron_moevement.integrations.megatron.snapshots import LiveOperators  # noqa: PLC0415
    from tests.harness.group_step_adam import install  # noqa: PLC0415

    install()
    with tiny_job(*flags) as job:
        live = LiveOperators(job.chunks, job.optimizer)
        new = counts(job)
        live.set_step([operator.id for operator in live.operators], 5)
        job.optimizer.set_group_steps(5)
        return [new, counts(job), job.optimizer.adam_step()]


@pytest.mark.distributed
@pytest.mark.parametrize("name", JOBS)
def test_a_new_process_has_counts_that_snapshots_know_and_a_replay_sets(megatron_fork_server, name):
    ranks, flags = JOBS[name]
    job = megatron_fork_server.run(
        count_before_the_first_step, world_size=ranks, args=[flags.split()]
    )
    assert job.check().values == ([[0], [5], 5],) * ranks


def repeat_a_step(flags):
    """Trains two steps, and the second again with experts frozen and with all others frozen.

    Returns:
        The counts after each step; what differs where the count is set back, and where it is not.
    """
    from megatron_moevement.training.steps import build_datasets, open_steps  # noqa: PLC0415
    from tests.harness.frozen_step import FrozenStep, compare_frozen  # noqa: PLC0415
    from tests.harness.group_step_adam import install  # noqa: PLC0415

    install()
    with tiny_job(*flags) as job, open_steps(job, build_datasets(job), START) as step:
        seen = [counts(job)]
        step.run(StopRequest.NONE)
        seen.append(counts(job))
        frozen = FrozenStep(job, step.micro_batches())
        operators = frozenset(frozen.operators())
        experts = frozenset(one for one in operators if one.kind is OperatorKind.EXPERT)
        expected = frozen.run(operators)
        seen.append(counts(job))
        found = []
        for active in (experts, operators - experts):
            job.optimizer.set_group_steps(1)
            found.append(compare_frozen(frozen, expected, active)[0])
            seen.append(counts(job))
        forgotten, _ = compare_frozen(frozen, expected, experts)
        return seen, found, sorted(forgotten)


@pytest.mark.distributed
@pytest.mark.parametrize("name", slow_but(("ep2-sharded-bf16",), JOBS))
def test_a_step_repeated_with_frozen_operators_has_its_count_and_its_bits(
    megatron_fork_server, name
):
    ranks, flags = JOBS[name]
    job = megatron_fork_server.run(repeat_a_step, world_size=ranks, args=[flags.split()])
    for seen, found, forgotten in job.check().values:
        assert seen == [[0], [1], [2], [2], [2]]
        assert found == [{}, {}]
        assert forgotten == ["state"]


@pytest.mark.parametrize("decoupled", [True, False])
def test_it_computes_what_adam_of_torch_computes(decoupled):
    from tests.harness.group_step_adam import GroupStepAdam  # noqa: PLC0415

    values = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    random = torch.Generator().manual_seed(3)
    start = torch.randn(20, dtype=torch.float64, generator=random)
    weights = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    torch_adam = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizers = [
        GroupStepAdam([weights[0]], adam_w_mode=decoupled, **values),
        torch_adam([weights[1]], **values),
    ]
    for _ in range(5):
        gradient = torch.randn(20, dtype=torch.float64, generator=random)
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(*weights, rtol=1e-12, atol=1e-12)  # other orders of operations
