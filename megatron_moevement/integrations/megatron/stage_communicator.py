"""Megatron's point-to-point communicator, told by our schedule what is computed.

Upstream's schedules call it with tensors alone: neither micro-batch nor model chunk. Our forward
step runs inside of the schedule and knows both, so it can tell them with no patch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator


@dataclasses.dataclass(frozen=True)
class ForwardPass:
    """The forward pass of one micro-batch through one model chunk.

    Attributes:
        received: what came in over the boundary; None on the first chunk of the model.
        output: what is sent on, or the loss.
    """

    chunk: int
    micro_batch: int
    received: torch.Tensor | None
    output: torch.Tensor


class StageCommunicator(P2PCommunicator):  # type: ignore[misc]  # upstream is not typed
    """Sends and receives as upstream does; subclasses learn what it is that crosses."""

    _before_send: Callable[[], None] | None = None

    @contextlib.contextmanager
    def training_pass(self, step: int | None, num_microbatches: int) -> Iterator[None]:
        """Encloses the forward and backward passes of a step; evaluation has none.

        Args:
            step: k of the step; None when the caller does not say.
        """
        del step, num_microbatches
        yield

    def computed(self, forward_pass: ForwardPass) -> None:
        """Is told of each forward pass, in evaluation too, before its output is sent."""

    def before_next_send(self, action: Callable[[], None] | None) -> None:
        """Has something done once, before the next tensor is sent; None takes it back."""
        self._before_send = action

    def _communicate(
        self,
        *,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Sequence[int] | None,
        wait_on_reqs: bool = True,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, Any]:
        """Does what upstream does; everything that crosses a boundary comes by here."""
        if tensor_send_next is not None or tensor_send_prev is not None:
            action, self._before_send = self._before_send, None
            if action is not None:
                action()
        exchanged: tuple[torch.Tensor | None, torch.Tensor | None, Any] = super()._communicate(
            tensor_send_next=tensor_send_next,
            tensor_send_prev=tensor_send_prev,
            recv_prev=recv_prev,
            recv_next=recv_next,
            tensor_shape=tensor_shape,
            wait_on_reqs=wait_on_reqs,
        )
        return exchanged
