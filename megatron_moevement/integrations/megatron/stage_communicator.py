"""Megatron's point-to-point communicator, told by our schedule what is computed.

Upstream's schedules call it with tensors alone: neither micro-batch nor model chunk. Our forward
step runs inside of the schedule and knows both, so it can tell them with no patch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator


@dataclasses.dataclass(frozen=True)
class ForwardPass:
    """The forward pass of one micro-batch through one model chunk.

    Attributes:
        chunk: the model chunk of this stage.
        micro_batch: number of the micro-batch within the step.
        received: what came in over the boundary; None on the first chunk of the model.
        output: what is sent on, or the loss.
    """

    chunk: int
    micro_batch: int
    received: torch.Tensor | None
    output: torch.Tensor


class StageCommunicator(P2PCommunicator):  # type: ignore[misc]  # upstream is not typed
    """Sends and receives as upstream does; subclasses learn what it is that crosses."""

    @contextlib.contextmanager
    def training_pass(self, step: int | None, num_microbatches: int) -> Iterator[None]:
        """Encloses the forward and backward passes of a step; evaluation has none.

        Args:
            step: k of the step; None when the caller does not say.
            num_microbatches: forward passes of each chunk.
        """
        del step, num_microbatches
        yield

    def computed(self, forward_pass: ForwardPass) -> None:
        """Is told of each forward pass, in evaluation too, before its output is sent."""
