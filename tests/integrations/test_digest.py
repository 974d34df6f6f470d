# SPDX-License-Identifier: Apache-2.0
"""Two operators have one digest exactly when all bits of their state are equal."""

import dataclasses

import pytest
import torch

from megatron_moevement.runtime.coordination.commit_barrier import StopRequest
from megatron_moevement.runtime.coordination.progress import START
from tests.harness.tiny_job import tiny_job

pytestmark = pytest.mark.distributed

BIAS = (
    "--moe-router-score-function=sigmoid",
    "--moe-router-enable-expert-bias",
    "--moe-router-load-balancing-type=none",
    "--moe-aux-loss-coeff=0",
)
JOBS = {
    "fp32": (1, []),
    "bf16 with expert bias": (1, ["--bf16", *BIAS]),
    "fp16 with a sharded optimizer": (
        2,
        ["--fp16", "--initial-loss-scale=65536", "--use-distributed-optimizer"],
    ),
}


def trained_states(job):
    from megatron_moevement.integrations.megatron.inventory import (  # noqa: PLC0415
        operator_states,
    )
    from megatron_moevement.training.steps import build_datasets, open_steps  # noqa: PLC0415

    with open_steps(job, build_datasets(job), START) as step:
        step.run(StopRequest.NONE)
    return operator_states(job.chunks, job.optimizer)


def flip(tensor, byte, bit):
    """Flips one bit of a tensor in place."""
    flat = tensor.detach().view(-1).view(torch.uint8)
    flat[byte] ^= 1 << bit


def flip_bits(flags):
    """Flips bits of every tensor of this rank, one at a time; returns the kinds of tensors."""
    from megatron_moevement.integrations.megatron.digest import operator_digest  # noqa: PLC0415

    kinds = set()
    with tiny_job(*flags) as job:
        for state in trained_states(job):
            digest = operator_digest(state)
            for name, tensor in (*state.compute.items(), *state.optimizer.items()):
                check_flips(lambda s=state: operator_digest(s), digest, name, tensor)
                kinds.add(name.rpartition(".")[2])
    return sorted(kinds)


def check_flips(digest_of, digest, name, tensor):
    """The lowest and highest bit of the first, a middle and the last byte; all of a small one."""
    size = tensor.numel() * tensor.element_size()
    places = range(size) if size <= 4 else (0, size // 2, size - 1)
    for byte in places:
        for bit in range(8) if size <= 4 else (0, 7):
            flip(tensor, byte, bit)
            assert digest_of() != digest, (name, byte, bit)
            flip(tensor, byte, bit)
    assert digest_of() == digest, name


@pytest.mark.parametrize("name", JOBS)
def test_any_single_bit_of_an_operator_changes_its_digest(megatron_fork_server, name):
    ranks, flags = JOBS[name]
    for kinds in megatron_fork_server.run(flip_bits, world_size=ranks, args=[flags]).check().values:
        assert {"master", "exp_avg", "exp_avg_sq", "step", "weight"} <= set(kinds)
        assert ("expert_bias" in kinds) == (BIAS[1] in flags)


def describe_otherwise():
    """Returns digests of states whose bytes are equal and whose description is not."""
    from megatron_moevement.integrations.megatron.digest import operator_digest  # noqa: PLC0415
    from megatron_moevement.integrations.megatron.inventory import OperatorState  # noqa: PLC0415
    from megatron_moevement.policy.job.operators import OperatorId, OperatorKind  # noqa: PLC0415

    weight = torch.zeros(2, 2)
    state = OperatorState(OperatorId(OperatorKind.GATE, 0), {"a": weight}, {"a": {"step": 1.0}})
    variants = [
        state,
        dataclasses.replace(state, compute={"b": weight}),
        dataclasses.replace(state, compute={"a": weight.view(4)}),
        dataclasses.replace(state, compute={"a": weight.view(torch.int32)}),
        dataclasses.replace(state, compute={}),
        dataclasses.replace(state, kept={"a": {"step": 2.0}}),
        dataclasses.replace(state, kept={}),
        dataclasses.replace(state, compute={"a": weight, "c": weight}),
    ]
    reordered = [{"a": weight, "c": weight}, {"c": weight, "a": weight}]
    return [
        [operator_digest(variant) for variant in variants],
        [operator_digest(dataclasses.replace(state, compute=one)) for one in reordered],
        [
            operator_digest(dataclasses.replace(state, compute={"a": one}))
            for one in (weight, weight.clone().t())
        ],
    ]


def test_names_shapes_and_types_count_and_their_order_does_not(megatron_fork_server):
    (values,) = megatron_fork_server.run(describe_otherwise, world_size=1).check().values
    variants, reordered, strided = values
    assert len(set(variants)) == len(variants)
    assert len(set(reordered)) == 1
    assert len(set(strided)) == 1
