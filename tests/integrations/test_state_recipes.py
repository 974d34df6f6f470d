# SPDX-License-Identifier: Apache-2.0
"""Every state recipe keeps the same promises with every optimizer."""

import importlib

import pytest

from megatron_moevement.policy.job.model_shape import Capture, ModelShape, inventory_of
from megatron_moevement.policy.job.ranks import Layout, LogicalRank
from megatron_moevement.policy.job.state_recipe import (
    RECIPES,
    NumberType,
    StateRecipe,
    StateTensor,
)
from tests.harness.tiny_job import tiny_job

BIAS = (
    "--moe-router-score-function=sigmoid --moe-router-enable-expert-bias "
    "--moe-router-load-balancing-type=none --moe-aux-loss-coeff=0"
)
SHARDED = "--use-distributed-optimizer"
JOBS = {
    "fp32": "",
    "bf16": f"--bf16 {BIAS}",
    "fp16": "--fp16 --initial-loss-scale=1024",
    "sharded-fp32": SHARDED,
    "sharded-bf16": f"{SHARDED} --bf16 --overlap-grad-reduce --overlap-param-gather",
    "sharded-fp16": f"{SHARDED} --fp16 --initial-loss-scale=1024 {BIAS}",
}


FIRST, SECOND = RECIPES[NumberType.BF16].moments
OTHERS = {
    "without the second moment": StateRecipe(NumberType.BF16, moments=(FIRST,)),
    "with a smaller moment": StateRecipe(
        NumberType.BF16, moments=(StateTensor("exp_avg", NumberType.BF16), SECOND)
    ),
    "of other weights": StateRecipe(NumberType.FP16),
}


def broken(flags):
    from tests.harness.recipe_contract import broken_promises  # noqa: PLC0415

    with tiny_job(*flags) as job:
        return broken_promises(job)


@pytest.mark.distributed
@pytest.mark.parametrize("name", JOBS)
def test_every_recipe_keeps_the_promises_with_every_optimizer(megatron_fork_server, name):
    job = megatron_fork_server.run(broken, world_size=1, args=[JOBS[name].split()])
    assert job.check().values == ([],)


@pytest.mark.parametrize(
    ("recipe", "full", "compute"),
    [
        (RECIPES[NumberType.FP32], 12, 4),
        (RECIPES[NumberType.BF16], 12, 2),
        (RECIPES[NumberType.FP16], 12, 2),
        (StateRecipe(NumberType.BF16, moments=(FIRST,)), 8, 2),
    ],
)
def test_a_model_that_does_not_exist_is_planned_by_the_recipe(recipe, full, compute):
    shape = ModelShape(2, 4, 8, 16)
    inventory = inventory_of(shape, Layout(), Capture.WHOLE, recipe)
    operators = inventory.by_rank[LogicalRank()]
    parameters = 2 * (4 * 16 + 3 * 4 * 8 + 2 * 4) + 2 * 16 * 4 + 4
    assert sum(one.full_bytes for one in operators) == full * parameters
    assert sum(one.compute_bytes for one in operators) == compute * parameters


def refusal(recipe):
    """Returns why the state of a job is not captured by another recipe."""
    from megatron_moevement.integrations.megatron.snapshots import LiveOperators  # noqa: PLC0415

    with tiny_job("--bf16") as job:
        job.optimizer.recipe = OTHERS[recipe]
        with pytest.raises(AssertionError) as refused:
            LiveOperators(job.chunks, job.optimizer)
        return str(refused.value)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("recipe", "line"),
    [
        ("without the second moment", "the optimizer keeps exp_avg, exp_avg_sq, master, step of"),
        ("with a smaller moment", "exp_avg is torch.float32, in its recipe bfloat16"),
        ("of other weights", "weight is torch.bfloat16, in its recipe float16"),
    ],
)
def test_state_that_a_recipe_does_not_describe_is_refused(megatron_fork_server, recipe, line):
    job = megatron_fork_server.run(refusal, world_size=1, args=[recipe]).check()
    assert line in job.values[0]


def forget_moments(self, operator, content, host):
    for piece, tensor in zip(self.pieces(operator, content), host, strict=True):
        if not piece.name.endswith("exp_avg_sq"):
            piece.elements.copy_(tensor)


_MEGATRON = "integrations.megatron"
MUTATIONS = {
    "masters are not cast": (f"{_MEGATRON}.masters._CopiedMasters.cast", lambda self: None),
    "masters are the parameters": (
        f"{_MEGATRON}.masters._CopiedMasters.master_of",
        lambda self, parameter: parameter,
    ),
    "one master is all parameters'": (
        f"{_MEGATRON}.masters._CopiedMasters.master_of",
        lambda self, parameter: self.part.get_parameters()[0],
    ),
    "a moment is not put back": (
        f"{_MEGATRON}.snapshots.LiveOperators.put_back",
        forget_moments,
    ),
    "COMPUTE weighs as FULL": (
        "policy.job.state_recipe.StateRecipe.bytes_per_parameter",
        lambda self, content: 12,
    ),
    "slots are laid out larger": (
        f"{_MEGATRON}.slot_layout.Part.size_bytes",
        property(lambda self: 64 + sum(piece.size_bytes for piece in self.pieces)),
    ),
}
FULL, COMPUTE, SIZES, PLANNED, MASTERS = (
    "FULL put back gives the same bits",
    "COMPUTE put back gives the same compute weights",
    "sizes are those of the captured bytes",
    "windows are planned and laid out by these sizes",
    "each parameter has a master of its own",
)
SEEN_BY = {
    "masters are not cast": [FULL, COMPUTE],
    "masters are the parameters": ["no optimizer steps"],
    "one master is all parameters'": [FULL, COMPUTE, SIZES, MASTERS],
    "a moment is not put back": [FULL],
    "COMPUTE weighs as FULL": [SIZES],
    "slots are laid out larger": [PLANNED],
}


def broken_by(mutation):
    path, replacement = MUTATIONS[mutation]
    module, owner, name = path.rsplit(".", 2)
    found = getattr(importlib.import_module(f"megatron_moevement.{module}"), owner)
    assert name in vars(found)
    setattr(found, name, replacement)
    try:
        return broken(["--bf16"])
    except AssertionError as error:
        return [str(error)[: len("no optimizer steps")]]


@pytest.mark.distributed
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_contract_finds_what_is_broken(megatron_fork_server, mutation):
    job = megatron_fork_server.run(broken_by, world_size=1, args=[mutation]).check()
    assert job.values == (SEEN_BY[mutation],)
