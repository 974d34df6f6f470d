"""Emulated compute: every stage waits for a fixed time in each pass, without using the CPU.

What a schedule costs then shows on a machine with fewer cores than stages. The real passes, of a
model that is as small as can be, take place as well: the bits are those of training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from megatron_moevement.integrations.megatron.schedule import MicroBatch, PipelineSchedule

_FORWARD_SHARE = 1 / 3
"""Of a stage's time per micro-batch; a backward pass takes twice as long as a forward pass."""


def wait_in_stages(stage_s: float) -> None:
    """Makes every pass of this process take its time from now on.

    Args:
        stage_s: seconds of a stage per micro-batch, forward and backward together. What the real
            forward pass takes is part of it.
    """
    compute = PipelineSchedule._forward_step  # noqa: SLF001  (the seam: no hook in the program)
    forward_s = stage_s * _FORWARD_SHARE

    def wait_backward(gradient: torch.Tensor) -> None:
        del gradient
        time.sleep(stage_s - forward_s)

    def forward_step(
        self: PipelineSchedule, batches: Iterator[tuple[int, bool, MicroBatch]], chunk: Any
    ) -> Any:
        started_s = time.perf_counter()
        output, loss = compute(self, batches, chunk)
        if output.requires_grad:
            output.register_hook(wait_backward)  # type: ignore[no-untyped-call]
        time.sleep(max(0.0, started_s + forward_s - time.perf_counter()))
        return output, loss

    PipelineSchedule._forward_step = forward_step  # type: ignore[method-assign]  # noqa: SLF001
