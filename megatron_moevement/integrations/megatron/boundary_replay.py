# SPDX-License-Identifier: Apache-2.0
"""Replaying a stage without its neighbours: what they sent comes from their logs.

The ordinary schedule runs. What the stage sends goes to its own log again, so that a later fault of
a neighbour is served, and is compared with the hashes that the receivers kept.

Source: section 3.3 of the paper.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from enum import Enum

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig

from megatron_moevement.integrations.megatron.boundary_log import (
    BoundaryOrderError,
    LoggedCommunicator,
)
from megatron_moevement.integrations.megatron.stage_communicator import Arrived, Exchange
from megatron_moevement.policy.job.boundary import BoundaryTag, Direction
from megatron_moevement.runtime.upstream_log.log_writer import LogWriter

LogSource = Callable[[BoundaryTag], torch.Tensor]
"""Returns a logged tensor, in host memory; raises if there is none."""
ReceivedHash = Callable[[BoundaryTag], int | None]
"""Returns the hash that the receiver kept of a tensor, None if it kept none."""


class Neighbour(Enum):
    """The stages on both sides."""

    PREVIOUS = "previous"
    NEXT = "next"


@dataclasses.dataclass(frozen=True)
class Verification:
    """How what a replay sent again compares with what was received the first time.

    Attributes:
        equal: tensors that are the same, bit for bit.
        unknown: names of those that can't be compared: the receiver kept no hash, or the log had
            no room.
    """

    equal: int
    unequal: tuple[BoundaryTag, ...]
    unknown: tuple[BoundaryTag, ...]

    @property
    def verified(self) -> bool:
        """Whether everything that was sent again is known to be the same."""
        return not self.unequal and not self.unknown


class _Done:
    """The request of a message that needs no waiting."""

    def wait(self) -> None:
        """Returns at once."""


class ReplayCommunicator(LoggedCommunicator):
    """Receives from logs, sends to its own log alone.

    Neighbours that replay along are talked to as usual; what goes to them is logged, too.
    """

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        config: ModelParallelConfig,
        writer: LogWriter,
        source: LogSource,
        *,
        device: torch.device,
        live: Iterable[Neighbour] = (),
    ) -> None:
        """Names the logs.

        Args:
            pp_group: the pipeline's process group; nothing is sent in it but to live neighbours.
            source: serves what the neighbours logged for this rank.
        """
        super().__init__(pp_group, config, writer)
        self._source = source
        self._device = device
        self._live = frozenset(live)

    def verify(
        self,
        step: int,
        received_hash: ReceivedHash,
        ways: Iterable[Direction] = tuple(Direction),
    ) -> Verification:
        """Compares what a replayed step sent with what its receivers kept hashes of.

        Args:
            ways: which tensors; a receiver that replays along has nothing to compare with.
        """
        self.writer.await_landed()
        sent = self.writer.log.sent(step)
        equal, unequal, unknown = 0, [], []
        crossings = self._crossings()
        for tag in (tag for way in ways for tag in crossings.sent(step, self._stage, way)):
            expected = received_hash(tag)
            if expected is None or tag not in sent:
                unknown.append(tag)
            elif expected != sent[tag].hash:
                unequal.append(tag)
            else:
                equal += 1
        return Verification(equal, tuple(unequal), tuple(unknown))

    def _exchange(self, exchange: Exchange) -> Arrived:
        """Talks to live neighbours and takes from logs what the others would send."""
        if self._pass is None:
            raise RuntimeError("only training is replayed: evaluation needs all stages")
        with_next, with_previous = Neighbour.NEXT in self._live, Neighbour.PREVIOUS in self._live
        previous = following = requests = None
        if self._live:
            live = dataclasses.replace(
                exchange,
                tensor_send_next=exchange.tensor_send_next if with_next else None,
                tensor_send_prev=exchange.tensor_send_prev if with_previous else None,
                recv_prev=exchange.recv_prev and with_previous,
                recv_next=exchange.recv_next and with_next,
            )
            previous, following, requests = super()._exchange(live)
        if exchange.recv_prev and not with_previous:
            previous = self._from_log(self._pass.awaited(Direction.FORWARD))
        if exchange.recv_next and not with_next:
            following = self._from_log(self._pass.awaited(Direction.BACKWARD))
        if not exchange.wait_on_reqs:
            wanted = {
                "send_next": exchange.tensor_send_next is not None,
                "recv_prev": exchange.recv_prev,
                "send_prev": exchange.tensor_send_prev is not None,
                "recv_next": exchange.recv_next,
            }
            requests = {name: _Done() for name in wanted if wanted[name]} | (requests or {})
        return previous, following, requests

    def _from_log(self, tag: BoundaryTag) -> torch.Tensor:
        """Returns a logged tensor as if it had come in."""
        logged = self._source(tag)
        if logged.dtype is not self.config.pipeline_dtype:
            raise BoundaryOrderError(
                f"{tag} was logged as {logged.dtype}, this stage receives "
                f"{self.config.pipeline_dtype}: the log is of another job"
            )
        # The log's own memory must not be written to, nor be shared with another micro-batch.
        return logged.to(self._device, copy=True).requires_grad_()
