# SPDX-License-Identifier: Apache-2.0
"""Expert-parallel ranks that begin to train in different layers, while others are frozen.

Each layer's backward pass exchanges gradients of tokens between them: where their graphs began in
different layers, these jobs would never end.
"""

import random

import pytest
import torch.distributed as dist

from tests.harness.default_run import slow_but
from tests.harness.tiny_job import TINY

pytestmark = pytest.mark.distributed

EP2 = "--expert-model-parallel-size=2"
PP2 = "--pipeline-model-parallel-size=2"
SHARDED = "--use-distributed-optimizer"
DROPOUT = ("--attention-dropout=0.1", "--hidden-dropout=0.1")
FULL = ("--recompute-granularity=full", "--recompute-num-layers=1")
RECOMPUTE = (*FULL, "--recompute-method=uniform")
SELECTIVE = "--recompute-granularity=selective"


def compare(step, expected, active):
    from tests.harness.frozen_step import compare_frozen  # noqa: PLC0415

    found, _ = compare_frozen(step, expected, active)
    return found


def frozen_step(flags):
    from tests.harness.frozen_step import opened_frozen_step  # noqa: PLC0415

    return opened_frozen_step(TINY, flags)


def freeze_unlike_peers(flags, seeds):
    """Repeats a step where expert-parallel ranks begin to train in different layers.

    First all but one expert of one rank are frozen, then of each rank independently a random part
    of its experts; the dense operators of a later layer are trained or frozen as well.
    """
    with frozen_step(flags) as step:
        expected = step.run(frozenset(step.operators()))
        rank, found = dist.get_rank(), {}
        own = sorted(one for one in step.freezing.operators if one.expert is not None)
        for layer in (0, 1):
            alone = next(one for one in own if one.layer == layer)
            for owner in range(dist.get_world_size()):
                active = frozenset([alone] if rank == owner else [])
                name = f"an expert of layer {layer} on rank {owner}"
                found[name] = compare(step, expected, active)
        for seed in seeds:
            draw = random.Random(2 * seed + rank)
            active = {one for one in own if draw.random() < 0.25}
            common = random.Random(seed).choice(("layers.1.rest", "layers.1.gate", "head", ""))
            active |= {one for one in step.freezing.operators if str(one) == common}
            found[f"seed {seed}"] = compare(step, expected, frozenset(active))
        return found


UNLIKE = {
    "sharded": (),
    "grouped": ("--bf16", "--moe-grouped-gemm"),
    "allgather": ("--moe-token-dispatcher-type=allgather",),
    "shared": ("--moe-shared-expert-intermediate-size=32", "--moe-shared-expert-gate"),
    "overlapped": (
        "--bf16",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--ddp-bucket-size=5000",
    ),
    "recompute": (*RECOMPUTE, *DROPOUT),
    "recompute-block": (*FULL, "--recompute-method=block"),
    "recompute-selective": (SELECTIVE, "--recompute-modules", "core_attn", "moe"),
    "recompute-attention": (SELECTIVE,),
}


@pytest.mark.parametrize("name", slow_but(("sharded",), UNLIKE))
def test_expert_parallel_ranks_may_begin_to_train_in_different_layers(megatron_fork_server, name):
    flags = [EP2, SHARDED, "--untie-embeddings-and-output-weights", *UNLIKE[name]]
    job = megatron_fork_server.run(freeze_unlike_peers, world_size=2, args=[flags, [1, 2, 3, 4]])
    for found in job.check().values:
        assert found == {which: {} for which in found}


INTERLEAVED = (
    PP2,
    "--num-layers=4",
    "--num-virtual-stages-per-pipeline-rank=2",
    "--global-batch-size=16",
)
UNLIKE_IN_PIPELINES = {
    "pp2": [PP2],
    "vpp2": [*INTERLEAVED],
    "vpp2-recompute": [*INTERLEAVED, *RECOMPUTE],
}


def freeze_unlike_peers_of_a_stage(flags):
    """Repeats a step where one expert of one rank of the job is trained, for each in turn."""
    with frozen_step(flags) as step:
        expected = step.run(frozenset(step.operators()))
        found = {}
        for one in step.operators():
            if one.expert is not None and one.expert % 2 == 0:
                found[str(one)] = compare(step, expected, frozenset([one]))
        return found


@pytest.mark.slow
@pytest.mark.parametrize("name", UNLIKE_IN_PIPELINES)
def test_ranks_of_a_stage_begin_in_one_layer_in_a_pipeline(megatron_fork_server, name):
    flags = [EP2, SHARDED, *UNLIKE_IN_PIPELINES[name]]
    job = megatron_fork_server.run(freeze_unlike_peers_of_a_stage, world_size=4, args=[flags])
    for found in job.check().values:
        assert len(found) > 3
        assert found == {which: {} for which in found}
