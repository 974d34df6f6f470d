# SPDX-License-Identifier: Apache-2.0
"""Weight gradients of frozen operators that are computed and dropped: the same bits, no saving."""

import pytest

from megatron_moevement.runtime.coordination.commit_barrier import StopRequest
from megatron_moevement.runtime.coordination.progress import START
from tests.harness.default_run import slow_but
from tests.harness.tiny_job import tiny_job

pytestmark = pytest.mark.distributed

OVERLAP = "--overlap-grad-reduce --ddp-bucket-size=5000"
SHARDED = f"--use-distributed-optimizer {OVERLAP} --overlap-param-gather"
JOBS = {
    "fp32-dropout": (1, "--attention-dropout=0.1 --hidden-dropout=0.1"),
    "fp16-grouped": (1, "--fp16 --initial-loss-scale=1024 --moe-grouped-gemm"),
    "dp3": (3, OVERLAP),
    "dp3-sharded-bf16": (3, f"{SHARDED} --bf16"),
    "pp2-tied": (2, "--pipeline-model-parallel-size=2 --bf16"),
}


def drop_at_random(flags):
    """Repeats a step with operators frozen; returns what differs, gradients and products too."""
    from megatron_moevement.integrations.megatron.freezing import FrozenWork  # noqa: PLC0415
    from megatron_moevement.training.steps import build_datasets, open_steps  # noqa: PLC0415
    from tests.harness.frozen_step import (  # noqa: PLC0415
        FrozenStep,
        compare_frozen,
        differences,
        random_active,
    )

    found = []
    with tiny_job(*flags) as job, open_steps(job, build_datasets(job), START) as train_step:
        train_step.run(StopRequest.NONE)
        step = FrozenStep(job, train_step.micro_batches(), FrozenWork.DROPPED)
        operators = step.operators()
        expected = step.run(frozenset(operators))
        for active in (*(random_active(operators, seed) for seed in (1, 2)), frozenset()):
            different, seen = compare_frozen(step, expected, active)
            found += different
            for one in step.freezing.frozen:
                found += differences(seen.gradients[one], expected.gradients[one])
            found += [] if seen.flops == expected.flops else ["flops"]
    return found


@pytest.mark.parametrize("name", slow_but(("fp16-grouped", "pp2-tied"), JOBS))
def test_nothing_is_left_out_and_nothing_frozen_changes(megatron_fork_server, name):
    ranks, flags = JOBS[name]
    job = megatron_fork_server.run(drop_at_random, world_size=ranks, args=[flags.split()]).check()
    assert job.values == ([],) * ranks
