# SPDX-License-Identifier: Apache-2.0
"""Emulated compute: every stage waits for a fixed time in each pass, without using the CPU.

What a schedule costs then shows on a machine with fewer cores than stages. The real passes, of a
model that is as small as can be, take place as well: the bits are those of training. Where the
model is to be larger its layers are left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_moevement.integrations.megatron.pipeline_schedule import MicroBatch, PipelineSchedule

_FORWARD_SHARE = 1 / 3
"""Of a stage's time per micro-batch; a backward pass takes twice as long as a forward pass."""


def wait_in_stages(stage_s: float) -> None:
    """Makes every pass of this process take its time from now on; real compute is part of it.

    Args:
        stage_s: seconds of a stage per micro-batch, forward and backward together.
    """
    compute = PipelineSchedule._forward_step  # noqa: SLF001  (the seam: no hook in the program)
    forward_s = stage_s * _FORWARD_SHARE
    backward_s = stage_s - forward_s

    def forward_step(
        self: PipelineSchedule, batches: Iterator[tuple[int, bool, MicroBatch]], chunk: Any
    ) -> Any:
        started_s = time.perf_counter()
        output, loss = compute(self, batches, chunk)
        if output.requires_grad:
            _wait_backward(_received(chunk), output, backward_s)
        _wait_until(started_s + forward_s)
        return output, loss

    PipelineSchedule._forward_step = forward_step  # type: ignore[method-assign]  # noqa: SLF001


def leave_layers_out() -> None:
    """Makes layers give what they get from now on, forward and backward; their weights stay.

    Their gradients are zero. All that is done with weights, gradients and states is done: it takes
    as long as for others.
    """

    def forward(_: TransformerLayer, hidden_states: torch.Tensor, **__: Any) -> Any:
        return hidden_states, None

    TransformerLayer.forward = forward


def _wait_backward(received: torch.Tensor | None, output: torch.Tensor, backward_s: float) -> None:
    """Waits in a backward pass: at its end, which is the gradient for the stage before."""
    if received is None or not received.requires_grad:  # the first stage's ends nowhere
        output.register_hook(lambda _: time.sleep(backward_s))  # type: ignore[no-untyped-call]
        return
    ends_s = math.inf

    def begin(_: torch.Tensor) -> None:
        nonlocal ends_s
        ends_s = time.perf_counter() + backward_s

    output.register_hook(begin)  # type: ignore[no-untyped-call]
    received.register_hook(lambda _: _wait_until(ends_s))  # type: ignore[no-untyped-call]


def _received(chunk: torch.nn.Module) -> torch.Tensor | None:
    """Returns what a stage has received for the pass that it made last; None: it is the first."""
    inputs = (getattr(module, "input_tensor", None) for module in chunk.modules())
    return next((one for one in inputs if isinstance(one, torch.Tensor)), None)


def _wait_until(ends_s: float) -> None:
    time.sleep(max(0.0, ends_s - time.perf_counter()))
