# SPDX-License-Identifier: Apache-2.0
"""A recipe that is added by one file, this one: both moments in BF16, in half of the bytes.

Run as a program, the file is the training program with that recipe.
"""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from megatron_moevement.policy.job.model_shape import Capture, ModelShape, inventory_of
from megatron_moevement.policy.job.ranks import Layout, LogicalRank
from megatron_moevement.policy.job.state_recipe import (
    RECIPES,
    NumberType,
    StateRecipe,
    StateTensor,
)
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.training.program import main
from tests.harness.interruption import Run, digest_differences
from tests.harness.protected_run import Case, check_replays, die, next_death
from tests.harness.tiny_job import tiny_job

DEATHS = 2
MOMENTS = ("exp_avg", "exp_avg_sq")
TOY = StateRecipe(
    NumberType.BF16, moments=tuple(StateTensor(key, NumberType.BF16) for key in MOMENTS)
)


class ToyAdam(torch.optim.AdamW):
    """AdamW that computes in FP32 and keeps both moments in BF16, in the same tensors."""

    def step(self, closure=None):
        states = [self.state[one] for group in self.param_groups for one in group["params"]]
        kept = [(state, key, state[key]) for state in states for key in MOMENTS]
        for state, key, moment in kept:
            state[key] = moment.float()
        super().step(closure)
        for state, key, moment in kept:
            moment.copy_(state[key])
            state[key] = moment


def install():
    """Makes it the recipe of BF16 in this process."""
    RECIPES[NumberType.BF16] = TOY
    torch.optim.AdamW = ToyAdam


def broken(flags):
    from tests.harness.recipe_contract import broken_promises  # noqa: PLC0415

    install()
    with tiny_job("--bf16", *flags) as job:
        assert job.optimizer.recipe is TOY
        return broken_promises(job)


@pytest.mark.distributed
@pytest.mark.parametrize("flags", [[], ["--use-distributed-optimizer"]], ids=["whole", "sharded"])
def test_it_keeps_the_promises_of_every_recipe(megatron_fork_server, flags):
    job = megatron_fork_server.run(broken, world_size=1, args=[flags])
    assert job.check().values == ([],)


def captured_bytes():
    """Returns what FULL and COMPUTE hold of a model, and how many parameters it has."""
    from megatron_moevement.integrations.megatron.snapshots import LiveOperators  # noqa: PLC0415

    install()
    with tiny_job("--bf16") as job:
        operators = LiveOperators(job.chunks, job.optimizer).operators
        return [
            sum(one.full_bytes for one in operators),
            sum(one.compute_bytes for one in operators),
            sum(one.numel() for chunk in job.chunks for one in chunk.parameters()),
        ]


@pytest.mark.distributed
def test_a_job_captures_eight_bytes_of_each_parameter(megatron_fork_server):
    job = megatron_fork_server.run(captured_bytes, world_size=1).check()
    ((full, compute, parameters),) = job.values
    assert (full, compute) == (8 * parameters, 2 * parameters)


def test_windows_are_planned_with_eight_bytes_of_each_parameter():
    shape, rank = ModelShape(2, 4, 8, 16), LogicalRank()
    today, toy = (
        inventory_of(shape, Layout(), Capture.WHOLE, recipe).by_rank[rank]
        for recipe in (RECIPES[NumberType.BF16], TOY)
    )
    assert [one.full_bytes * 12 for one in toy] == [one.full_bytes * 8 for one in today]
    assert [one.compute_bytes for one in toy] == [one.compute_bytes for one in today]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_a_job_killed_twice_ends_with_the_bits_of_one_that_is_not(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    case = dataclasses.replace(Case.of("vpp2 bf16 replicated", 2), deaths=1)

    def with_toy(program):
        return dataclasses.replace(program, path=Path(__file__))

    plain = case.program(megatron_fork_server, text)
    expected = Run(with_toy(plain), tmp_path / "plain").finish()
    assert digest_differences(uninterrupted(case), expected) != []
    run = Run(with_toy(case.protected_program(megatron_fork_server, text)), tmp_path / "killed")
    for _ in range(DEATHS):
        die(run, case, FaultPoint.BARRIER, [next_death(run, case)])
    assert digest_differences(run.finish(), expected) == []
    check_replays(run, case, launches=DEATHS)


if __name__ == "__main__":
    install()
    sys.exit(main(sys.argv[1:]))
