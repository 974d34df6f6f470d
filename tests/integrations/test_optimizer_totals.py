# SPDX-License-Identifier: Apache-2.0
"""What is summed over a whole model is each of its elements once, however ranks share it."""

import math

import pytest
import torch.distributed as dist

from tests.harness.tiny_job import tiny_job

pytestmark = pytest.mark.distributed

EP2 = ["--expert-model-parallel-size=2"]
PP2 = ["--pipeline-model-parallel-size=2"]
TP2 = ["--tensor-model-parallel-size=2", "--sequence-parallel"]
UNTIED = "--untie-embeddings-and-output-weights"
LAYOUTS = {
    "pipeline and experts": [*PP2, *EP2],
    "tensors and experts": [*TP2, *EP2],
    "tensors and experts that are not split": [
        *TP2,
        *EP2,
        "--expert-tensor-parallel-size=1",
        UNTIED,
    ],
    "pipeline and tensors": [*PP2, *TP2],
}
SMALL = 1e-3
"""Gradients below are made zero: some of most weights."""
WHOLE_ON_TENSOR_RANKS = ("norm", "router")
"""Parts of the names of parameters that each tensor-parallel rank has whole."""


def pieces(job, value_of):
    """Returns a number of each piece of the model that this rank has, by what names the piece."""
    from megatron.core import parallel_state as places  # noqa: PLC0415

    found = {}
    is_tied = not job.arguments.architecture.untie_embeddings_and_output_weights
    for chunk in job.chunks:
        for name, parameter in chunk.named_parameters():
            if is_tied and "output_layer" in name:
                continue  # the last stage's copy of the embedding
            is_expert = not getattr(parameter, "allreduce", True)
            if is_expert:
                ranks = (
                    places.get_expert_model_parallel_rank(),
                    places.get_expert_tensor_parallel_rank(),
                )
            elif any(part in name for part in WHOLE_ON_TENSOR_RANKS):
                ranks = ()
            else:
                ranks = (places.get_tensor_model_parallel_rank(),)
            stage = places.get_pipeline_model_parallel_rank()
            found[stage, name, is_expert, *ranks] = value_of(parameter)
    return found


def over_all_ranks(job, value_of):
    """Returns the sum over the pieces of all ranks, each once."""
    all_pieces = [None] * dist.get_world_size()
    dist.all_gather_object(all_pieces, pieces(job, value_of))
    return sum({key: value for own in all_pieces for key, value in own.items()}.values())


def sum_up(flags):
    """Returns the sums, and what they are by the pieces of every rank."""
    from megatron_moevement.runtime.coordination.progress import START  # noqa: PLC0415
    from megatron_moevement.training.steps import build_datasets, open_steps  # noqa: PLC0415

    with tiny_job(*flags) as job, open_steps(job, build_datasets(job), START) as step:
        job.schedule.forward_backward(step.micro_batches())
        for chunk in job.chunks:
            for one in chunk.parameters():
                one.main_grad[one.main_grad.abs() < SMALL] = 0.0  # by themselves none are zero
        statistics = job.optimizer.prepare()
        counted = job.optimizer.count_zeros(statistics)
        expected = over_all_ranks(job, lambda one: int((one.main_grad == 0).sum()))
        norm = job.optimizer.parameters_norm()
        squares = over_all_ranks(job, lambda one: float(one.detach().double().square().sum()))
        elements = over_all_ranks(job, lambda one: one.numel())
        return [counted, expected, elements, norm, math.sqrt(squares)]


TWO_ROUNDINGS = 2.0**-22
SOME = ("pipeline and experts", "tensors and experts that are not split")


@pytest.mark.parametrize("precision", [[], pytest.param(["--bf16"], marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "layout",
    [one if one in SOME else pytest.param(one, marks=pytest.mark.slow) for one in LAYOUTS],
)
def test_each_element_counts_once(megatron_fork_server, layout, precision):
    flags = [*LAYOUTS[layout], *precision]
    numbers = []
    for kind in ([], ["--use-distributed-optimizer"]):
        job = megatron_fork_server.run(sum_up, world_size=4, args=[[*flags, *kind]])
        numbers.append(job.check().values)
    whole, sharded = numbers
    counted, expected, elements, norm, norm_expected = whole[0]
    assert counted == expected
    assert 0 < counted < elements
    assert [rank[0] for rank in (*whole, *sharded)] == [counted] * 8
    assert {rank[3] for rank in whole} == {norm}
    # Each weight's norm is an FP32 number, and shards are cut through weights.
    assert norm == pytest.approx(norm_expected, rel=TWO_ROUNDINGS)
    assert [rank[3] for rank in sharded] == pytest.approx([norm] * 4, rel=TWO_ROUNDINGS)


def count_zeros_of_an_overflow(flags):
    from megatron_moevement.integrations.megatron.optimizer import (  # noqa: PLC0415
        GradientStatistics,
    )

    with tiny_job(*flags) as job:
        return job.optimizer.count_zeros(GradientStatistics(found_inf=(True,), norm=None))


def test_gradients_that_overflowed_are_not_counted(megatron_fork_server):
    job = megatron_fork_server.run(count_zeros_of_an_overflow, world_size=1, args=[[]])
    assert job.check().values == (None,)
