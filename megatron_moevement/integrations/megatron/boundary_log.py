# SPDX-License-Identifier: Apache-2.0
"""Logging what crosses a stage's boundaries, under names that a replay can ask for.

The name of a tensor is never where it lies or when it was sent. What is sent forward is named by
the forward pass that made it, what is sent backward by the input whose gradient it is; both are
recognised by identity. What is received is named by the order in which the neighbour sends, and
that is checked as soon as a forward pass uses it.

Source: section 3.3 of the paper.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.schedules import get_schedule_table

from megatron_moevement.errors import MoEvementError
from megatron_moevement.integrations.megatron.stage_communicator import (
    Arrived,
    Exchange,
    ForwardPass,
    StageCommunicator,
)
from megatron_moevement.policy.job.boundary import BoundaryTag, Direction
from megatron_moevement.policy.job.crossings import Crossings
from megatron_moevement.runtime.upstream_log.log import step_bytes
from megatron_moevement.runtime.upstream_log.log_writer import LogWriter

_REQUESTS = {Direction.FORWARD: "recv_prev", Direction.BACKWARD: "recv_next"}
"""What upstream calls the request of a message that comes in."""


class BoundaryOrderError(MoEvementError, RuntimeError):
    """A tensor crossed a boundary that is not the one expected there; nothing can be replayed."""


def crossings_of(config: ModelParallelConfig, pp: int, num_microbatches: int) -> Crossings:
    """Returns what crosses the boundaries in a step, from upstream's own table of the schedule."""
    chunks = config.virtual_pipeline_model_parallel_size or 1
    if chunks == 1:
        return Crossings(pp, 1, [(number, 0) for number in range(num_microbatches)])
    group = config.microbatch_group_size_per_vp_stage
    return Crossings(pp, chunks, get_schedule_table(num_microbatches, chunks, group))


def log_bytes(
    config: ModelParallelConfig,
    *,
    stage: int,
    pp: int,
    num_microbatches: int,
    micro_batch_size: int,
    seq_length: int,
) -> int:
    """Returns the bytes that a rank logs in a step, at most where sequences vary.

    Args:
        seq_length: tokens of a sample, at most.
    """
    crossings = crossings_of(config, pp, num_microbatches)
    tensors = sum(len(crossings.sent(0, stage, direction)) for direction in Direction)
    tokens = seq_length // config.context_parallel_size
    if config.sequence_parallel:
        tokens //= config.tensor_model_parallel_size
    shape = (tokens, micro_batch_size, config.hidden_size)
    return step_bytes(tensors, shape, config.pipeline_dtype) if tensors else 0


class _Pass:
    """The passes of one step: what crosses next, and what is known of what crossed."""

    def __init__(self, step: int, stage: int, crossings: Crossings) -> None:
        self.step = step
        self._stage = stage
        self._pp = crossings.pp
        self._to_send = {one: deque(crossings.sent(step, stage, one)) for one in Direction}
        self._to_receive = {one: deque(crossings.received(step, stage, one)) for one in Direction}
        self._received: dict[int, tuple[torch.Tensor, BoundaryTag]] = {}
        self._inputs: dict[tuple[int, int], torch.Tensor] = {}
        self._last: tuple[weakref.ref[torch.Tensor], int, int] | None = None

    def computed(self, done: ForwardPass) -> None:
        """Learns whose output comes next; checks that it used the tensor that is named so."""
        chunk = done.chunk * self._pp + self._stage
        self._last = (weakref.ref(done.output), chunk, done.micro_batch)
        if done.received is None:
            return
        _, tag = self._received.pop(id(done.received), (None, None))
        if tag is None or (tag.receiver, tag.micro_batch) != (chunk, done.micro_batch):
            raise BoundaryOrderError(
                f"step {self.step}: micro-batch {done.micro_batch} of model chunk {chunk} was "
                f"computed from what came in as {tag}; the schedule is not the one that is logged"
            )
        self._inputs[chunk, done.micro_batch] = done.received

    def next_sent(self, direction: Direction, tensor: torch.Tensor) -> BoundaryTag:
        """Returns the name of a tensor that is sent, which is the one that comes next."""
        tag = _take(self._to_send[direction], self.step, f"sent {direction.value}")
        if direction is Direction.FORWARD:
            output, chunk, micro_batch = self._last or (None, None, None)
            proven = output is not None and output() is tensor
            proven = proven and (chunk, micro_batch) == (tag.sender, tag.micro_batch)
        else:
            source = self._inputs.pop((tag.sender, tag.micro_batch), None)
            proven = source is not None and source.grad is tensor
        if not proven:
            raise BoundaryOrderError(
                f"step {self.step}: {tag} is due and another tensor is sent; "
                "the schedule is not the one that is logged"
            )
        return tag

    def next_received(self, direction: Direction, tensor: torch.Tensor) -> BoundaryTag:
        """Returns the name of what came in; remembers that of an input until its forward pass."""
        tag = _take(self._to_receive[direction], self.step, f"received {direction.value}")
        if direction is Direction.FORWARD:
            self._received[id(tensor)] = (tensor, tag)
        return tag

    def awaited(self, direction: Direction) -> BoundaryTag:
        """Returns the name of what will come in next."""
        return self._to_receive[direction][0]

    def check_is_over(self) -> None:
        """Raises BoundaryOrderError if something did not cross."""
        queues = (*self._to_send.values(), *self._to_receive.values())
        left = [tag for queue in queues for tag in queue]
        if left:
            raise BoundaryOrderError(
                f"step {self.step} is over and {len(left)} tensors did not cross, first {left[0]}"
            )


def _take(tags: deque[BoundaryTag], step: int, what: str) -> BoundaryTag:
    if not tags:
        raise BoundaryOrderError(f"step {step}: a tensor is {what} that is not expected")
    return tags.popleft()


@dataclasses.dataclass(frozen=True)
class _Arrival:
    """A request of a message that comes in, and what is to be done when it is there."""

    request: Any
    landed: Callable[[], None]

    def wait(self) -> None:
        self.request.wait()
        self.landed()


class LoggedCommunicator(StageCommunicator):
    """Copies what it sends in training to the upstream log, and hashes what it receives."""

    def __init__(
        self, pp_group: dist.ProcessGroup, config: ModelParallelConfig, writer: LogWriter
    ) -> None:
        super().__init__(pp_group, config)
        self.writer = writer
        self._stage: int = pp_group.rank()
        self._num_microbatches = 0
        self._pass: _Pass | None = None

    @contextlib.contextmanager
    def training_pass(self, step: int | None, num_microbatches: int) -> Iterator[None]:
        """Logs what crosses from here to the end of the block.

        Raises:
            ValueError: nobody says which step it is.
            BoundaryOrderError: the schedule sent other tensors than the log has names for.
        """
        if step is None:
            raise ValueError("a step that is logged needs its number: forward_backward(..., step)")
        self._num_microbatches = num_microbatches
        self.writer.log.begin_step(step)
        self._pass = current = _Pass(step, self._stage, self._crossings())
        try:
            yield
        finally:
            self._pass = None
        current.check_is_over()
        self.writer.log.end_step(step)

    def computed(self, forward_pass: ForwardPass) -> None:
        """Learns whose output is sent next."""
        if self._pass is not None:
            self._pass.computed(forward_pass)

    def _crossings(self) -> Crossings:
        return crossings_of(self.config, self.pp_group.size(), self._num_microbatches)

    def _communicate(self, **arguments: Any) -> Arrived:
        """Does what upstream does; everything that crosses a boundary comes by here."""
        exchange, current = Exchange(**arguments), self._pass
        if current is None:
            return self._exchange(exchange)
        for direction, tensor in (
            (Direction.FORWARD, exchange.tensor_send_next),
            (Direction.BACKWARD, exchange.tensor_send_prev),
        ):
            if tensor is not None:
                self._send(current.next_sent(direction, tensor), tensor)
        previous, following, requests = self._exchange(exchange)
        if exchange.recv_prev:
            self._receive(current, Direction.FORWARD, previous, requests)
        if exchange.recv_next:
            self._receive(current, Direction.BACKWARD, following, requests)
        return previous, following, requests

    def _send(self, tag: BoundaryTag, tensor: torch.Tensor) -> None:
        self.writer.sent(tag, tensor)

    def _receive(
        self, current: _Pass, direction: Direction, tensor: torch.Tensor | None, requests: Any
    ) -> None:
        """Names what comes in; hashes it when it is there."""
        assert tensor is not None
        tag = current.next_received(direction, tensor)

        def landed() -> None:
            self.writer.received(tag, tensor)

        name = _REQUESTS[direction]
        if isinstance(requests, dict) and name in requests:
            requests[name] = _Arrival(requests[name], landed)
        else:
            landed()
