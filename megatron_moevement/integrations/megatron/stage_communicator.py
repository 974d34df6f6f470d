# SPDX-License-Identifier: Apache-2.0
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


Arrived = tuple[torch.Tensor | None, torch.Tensor | None, Any]
"""From the previous stage, from the next one, and the requests that are still under way."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What crosses the boundaries of a stage in one call, by the names of upstream's arguments."""

    tensor_send_next: torch.Tensor | None
    tensor_send_prev: torch.Tensor | None
    recv_prev: bool
    recv_next: bool
    tensor_shape: Sequence[int] | None
    wait_on_reqs: bool = True


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

    def _communicate(self, **arguments: Any) -> Arrived:
        """Does what upstream does; everything that crosses a boundary comes by here."""
        return self._exchange(Exchange(**arguments))

    def _exchange(self, exchange: Exchange) -> Arrived:
        if exchange.tensor_send_next is not None or exchange.tensor_send_prev is not None:
            action, self._before_send = self._before_send, None
            if action is not None:
                action()
        arrived: Arrived = super()._communicate(**vars(exchange))
        return arrived
