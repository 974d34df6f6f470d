# SPDX-License-Identifier: Apache-2.0
"""Every bit of state belongs to exactly one operator."""

from collections import Counter

import pytest
import torch

from megatron_moevement.runtime.coordination.commit_barrier import StopRequest
from megatron_moevement.runtime.coordination.progress import START
from tests.harness.default_run import slow_but
from tests.harness.tiny_job import tiny_job

pytestmark = pytest.mark.distributed

SHARED = "--moe-shared-expert-intermediate-size=32 --moe-shared-expert-gate"
BIAS = (
    "--moe-router-score-function=sigmoid --moe-router-enable-expert-bias "
    "--moe-router-load-balancing-type=none --moe-aux-loss-coeff=0"
)
SHARDED = "--use-distributed-optimizer"
JOBS = {
    "fp32": (1, ""),
    "bf16": (1, "--bf16"),
    "fp16": (1, "--fp16 --initial-loss-scale=65536"),
    "grouped": (1, "--moe-grouped-gemm --bf16"),
    "shared": (1, f"{SHARED} --qk-layernorm --add-qkv-bias"),
    "expert-bias": (1, f"{BIAS} --bf16"),
    "dense-first-untied": (
        1,
        "--moe-layer-freq=[0]*1+[1]*1 --untie-embeddings-and-output-weights "
        "--position-embedding-type=learned_absolute --normalization=LayerNorm",
    ),
    "sharded": (2, SHARDED),
    "sharded-bf16": (2, f"{SHARDED} --bf16 {BIAS}"),
    "pp2-tied": (2, "--pipeline-model-parallel-size=2 --bf16"),
    "ep2-sharded-fp16": (
        2,
        f"--expert-model-parallel-size=2 {SHARDED} --fp16 --initial-loss-scale=65536",
    ),
    "vpp2": (
        2,
        "--pipeline-model-parallel-size=2 --num-layers=4 --num-virtual-stages-per-pipeline-rank=2",
    ),
}
QUICK = ("grouped", "shared", "dense-first-untied", "pp2-tied", "ep2-sharded-fp16", "vpp2")
ADAM = {"master", "exp_avg", "exp_avg_sq", "step"}


def train(job, steps):
    from megatron_moevement.training.steps import build_datasets, open_steps  # noqa: PLC0415

    with open_steps(job, build_datasets(job), START) as step:
        for _ in range(steps):
            step.run(StopRequest.NONE)


def states(job):
    from megatron_moevement.integrations.megatron.inventory import (  # noqa: PLC0415
        operator_states,
    )

    return operator_states(job.chunks, job.optimizer)


def held_by_model(job):
    """Returns what the model would put into a checkpoint: parameters and persistent buffers."""
    return {
        id(value): f"chunk{index}.{name}"
        for index, chunk in enumerate(job.chunks)
        for name, value in chunk.module.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
    }


def held_by_optimizer(job):
    """Returns all tensors of the torch optimizers: what they step, and their state."""
    held = []
    for part in job.optimizer.parts:
        if part.is_stub_optimizer:
            continue
        stepped = [one for group in part.optimizer.param_groups for one in group["params"]]
        assert {id(one) for one in stepped} == {id(one) for one in part.optimizer.state}
        held += stepped
        held += [value for state in part.optimizer.state.values() for value in state.values()]
    assert all(isinstance(value, torch.Tensor) for value in held)
    return [id(value) for value in held]


def count_owners(flags):
    """Checks that each tensor of this rank has one owner; returns names by operator."""
    with tiny_job(*flags) as job:
        train(job, 2)
        inventory = states(job)
        owned = Counter(id(value) for state in inventory for value in state.compute.values())
        assert owned == Counter(held_by_model(job).keys())
        trained = Counter(id(value) for state in inventory for value in state.optimizer.values())
        assert trained == Counter(held_by_optimizer(job))
        for state in inventory:
            assert {name.rpartition(".")[2] for name in state.optimizer} in (ADAM, set())
        return {str(state.operator): sorted(state.compute) for state in inventory}


@pytest.mark.parametrize("name", slow_but(QUICK, JOBS))
def test_every_tensor_belongs_to_exactly_one_operator(megatron_fork_server, name):
    ranks, flags = JOBS[name]
    job = megatron_fork_server.run(count_owners, world_size=ranks, args=[flags.split()])
    for operators in job.check().values:
        experts = {one.rpartition(".")[2] for one in operators if ".experts." in one}
        for operator, names in operators.items():
            assert names
            for one in names:
                assert belongs(operator, one, len(experts)), (operator, one)


def belongs(operator, name, num_local_experts):
    """Returns whether a tensor's name is one of those that an operator should have."""
    if ".experts." in operator:
        local = int(operator.rpartition(".")[2]) % num_local_experts
        return f".mlp.experts.local_experts.{local}." in name
    if operator.endswith(".gate"):
        return ".mlp.router." in name
    if operator.endswith(".rest"):
        return ".decoder.layers." in name and ".router." not in name and ".local_exp" not in name
    if operator == "embedding":
        return ".embedding." in name
    return operator == "head" and ("output_layer." in name or "final_layernorm." in name)


def claim_indexed_weights(flags):
    """Gives the layers experts as TransformerEngine's grouped linear names them.

    Returns:
        The operators that claim each weight of an expert, by its name; and the local experts.
    """
    from megatron_moevement.integrations.megatron.inventory import (  # noqa: PLC0415
        operator_of_parameters,
    )

    with tiny_job(*flags) as job:
        chunk = job.chunks[0].module
        mlp = chunk.decoder.layers[1].mlp
        mlp.experts = torch.nn.ModuleDict(
            {linear: torch.nn.Module() for linear in ("linear_fc1", "linear_fc2")}
        )
        for linear in mlp.experts.values():
            for local, _ in enumerate(mlp.local_expert_indices):
                for kind in ("weight", "bias"):
                    linear.register_parameter(f"{kind}{local}", torch.nn.Parameter(torch.ones(2)))
        claimed = {}
        for name, _, operator in operator_of_parameters(chunk):
            if name.startswith("decoder.layers.1.mlp.experts."):
                short = name.removeprefix("decoder.layers.1.mlp.experts.")
                claimed.setdefault(short, []).append(str(operator))
        return claimed, list(mlp.local_expert_indices)


def test_indexed_weights_of_grouped_experts_belong_to_one_expert_each(megatron_fork_server):
    flags = ["--expert-model-parallel-size=2", "--num-experts=24"]
    job = megatron_fork_server.run(claim_indexed_weights, world_size=2, args=[flags])
    for rank, (claimed, experts) in enumerate(job.check().values):
        assert experts == list(range(12 * rank, 12 * rank + 12))
        assert claimed == {
            f"{linear}.{kind}{local}": [f"layers.1.experts.{expert}"]
            for linear in ("linear_fc1", "linear_fc2")
            for kind in ("weight", "bias")
            for local, expert in enumerate(experts)
        }


def gate_buffers():
    with tiny_job(*BIAS.split()) as job:
        return {
            str(state.operator): [name.rpartition(".")[2] for name in state.compute]
            for state in states(job)
            if str(state.operator).endswith("gate")
        }


def test_the_bias_is_state_of_its_gate_and_counters_are_not(megatron_fork_server):
    (gates,) = megatron_fork_server.run(gate_buffers, world_size=1).check().values
    assert gates == {f"layers.{layer}.gate": ["weight", "expert_bias"] for layer in (0, 1)}


def forget(what):
    """Adds something that nobody knows of; returns how the inventory says so."""
    with tiny_job() as job:
        chunk = job.chunks[0].module
        stray = torch.nn.Parameter(torch.zeros(2))
        if what == "parameter":
            chunk.register_parameter("stray", stray)
        elif what == "buffer":
            chunk.register_buffer("stray", torch.zeros(2))
        elif what == "not stepped":
            chunk.decoder.layers[0].register_parameter("stray", stray)
        else:
            group = job.optimizer.parts[0].optimizer.param_groups[0]
            group["params"].append(stray)
        with pytest.raises(AssertionError) as noticed:
            states(job)
        return str(noticed.value)


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("parameter", "stray belongs to no operator"),
        ("buffer", "stray belongs to no operator"),
        ("not stepped", "no optimizer steps decoder.layers.0.stray"),
        ("stepped by the optimizer", "parameters of the optimizer's"),
    ],
)
def test_a_forgotten_tensor_is_noticed(megatron_fork_server, what, line):
    job = megatron_fork_server.run(forget, world_size=1, args=[what])
    assert line in job.check().values[0]


def new_state():
    """Adds a buffer to a layer and a state to its optimizer; returns where they went."""
    with tiny_job() as job:
        layer = job.chunks[0].module.decoder.layers[1]
        layer.self_attention.register_buffer("scale", torch.ones(1))
        part = job.optimizer.parts[0].optimizer
        part.state[part.param_groups[0]["params"][0]]["max_exp_avg_sq"] = torch.zeros(1)
        return {
            str(state.operator): [
                name
                for name in (*state.compute, *state.optimizer)
                if name.endswith(("scale", "max_exp_avg_sq"))
            ]
            for state in states(job)
        }


def test_new_buffers_and_new_optimizer_state_have_an_owner_at_once(megatron_fork_server):
    (found,) = megatron_fork_server.run(new_state, world_size=1).check().values
    names = [name for one in found.values() for name in one]
    assert found["layers.1.rest"][0].endswith("layers.1.self_attention.scale")
    assert [name.rpartition(".")[2] for name in sorted(names)].count("max_exp_avg_sq") == 1
    assert len(names) == 2
