# SPDX-License-Identifier: Apache-2.0
"""Jobs whose stage boundaries are logged: of each schedule, precision and optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_moevement.runtime.coordination.progress import START
from tests.harness.tiny_job import tiny_job

if TYPE_CHECKING:
    from megatron_moevement.training.job import Job
    from tests.harness.boundary_run import BoundaryRun

UNTIED = "--untie-embeddings-and-output-weights"
PP2 = "--pipeline-model-parallel-size=2"
PP3 = "--pipeline-model-parallel-size=3"
EP2 = "--expert-model-parallel-size=2"
VPP2 = "--num-virtual-stages-per-pipeline-rank=2"
BATCHED = "--no-overlap-p2p-communication"
DROPOUT = ("--attention-dropout=0.1", "--hidden-dropout=0.1")
HALF = ("--fp16", "--initial-loss-scale=16777216", "--loss-scale-window=2", "--hysteresis=1")
BIAS = ("--moe-router-score-function=sigmoid", "--moe-router-enable-expert-bias")
SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
JOBS = {
    "pp2": (2, [PP2, "--bf16", *BIAS], {}),
    "pp3": (3, [PP3, "--num-layers=3", *DROPOUT], {}),
    "pp2-ep2": (4, [PP2, EP2, *SHARDED, "--bf16", *BIAS, *DROPOUT], {}),
    "pp2-fp16": (2, [PP2, *HALF], {}),
    "tp2-pp2": (4, [PP2, "--tensor-model-parallel-size=2", "--sequence-parallel", *DROPOUT], {}),
    "vpp2-overlapped": (2, [PP2, VPP2, "--num-layers=4", "--bf16", *DROPOUT], {}),
    "vpp2-batched": (3, [PP3, VPP2, "--num-layers=6", BATCHED, "--micro-batch-size=1"], {}),
    "vpp2-flush": (
        2,
        [PP2, VPP2, "--num-layers=4"],
        {"overlap_p2p_comm_warmup_flush": True, "microbatch_group_size_per_vp_stage": 3},
    ),
    "shapes": (3, [PP3, "--num-layers=3"], {"variable_seq_lengths": True}),
}
"""Ranks, flags, and what is set in Megatron's config beyond the flags."""
SIZES = {
    "pp2": (2, 1, 6),
    "pp3": (3, 1, 6),
    "pp2-ep2": (2, 1, 3),
    "pp2-fp16": (2, 1, 6),
    "tp2-pp2": (2, 1, 6),
    "vpp2-overlapped": (2, 2, 6),
    "vpp2-batched": (3, 2, 12),
    "vpp2-flush": (2, 2, 6),
    "shapes": (3, 1, 6),
}
"""Stages, chunks of each, micro-batches."""
LENGTH, SHORTER = 16, 12
"""Of sequences; where lengths vary, of every second micro-batch."""
LENGTHS = {"shapes": [SHORTER, LENGTH], "tp2-pp2": [LENGTH // 2]}
"""Of the tensors that cross a boundary, where they are not all as long as a sequence."""
LAST = 5
"""Steps that are logged."""


def of_two_lengths(read: Callable[[], Any]) -> Callable[[], Any]:
    """Returns what reads the micro-batches of a step with every second one cut short."""

    def cut(name_and_tensor: tuple[str, Any], length: int) -> tuple[str, Any]:
        name, tensor = name_and_tensor
        return name, None if tensor is None else tensor[:, :length].contiguous()

    return lambda: [
        dict(cut(one, SHORTER if number % 2 else LENGTH) for one in batch.items())
        for number, batch in enumerate(read())
    ]


@contextlib.contextmanager
def boundary_run(
    flags: Sequence[str], config: Mapping[str, Any], max_steps: int = LAST
) -> Iterator[tuple[Job, BoundaryRun]]:
    """Opens a tiny job on this rank, and what logs its stage boundaries."""
    from megatron_moevement.training.steps import build_datasets, open_steps  # noqa: PLC0415
    from tests.harness.boundary_run import BoundaryRun  # noqa: PLC0415

    with (
        tiny_job(*flags, UNTIED, "--clip-grad=0.1") as job,
        open_steps(job, build_datasets(job), START) as step,
    ):
        for name, value in config.items():
            assert hasattr(job.chunks[0].config, name)
            setattr(job.chunks[0].config, name, value)
        if "variable_seq_lengths" in config:
            step.micro_batches = of_two_lengths(step.micro_batches)
        yield job, BoundaryRun(job, step, max_steps)
