# SPDX-License-Identifier: Apache-2.0
"""Crossings: which boundary tensors a stage sends and receives in a step, and in which order.

Messages between two ranks in one direction arrive in the order in which they were sent. So what a
stage receives next is what its neighbour sends next, whatever the schedule does in between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron_moevement.policy.job.boundary import BoundaryTag, Direction


@dataclasses.dataclass(frozen=True)
class Crossings:
    """The boundary tensors of one step of one pipeline.

    Attributes:
        forward_passes: `(micro-batch, chunk)` in the order in which every stage computes them;
            backward passes go through the chunks the other way round.
    """

    pp: int
    chunks: int
    forward_passes: Sequence[tuple[int, int]]

    def sent(self, step: int, stage: int, direction: Direction) -> tuple[BoundaryTag, ...]:
        """Returns what a stage sends in a direction, in order; nothing at the ends of the model."""
        last = self.pp * self.chunks - 1
        tags = []
        for micro_batch, forward_chunk in self.forward_passes:
            forward = direction is Direction.FORWARD
            chunk = forward_chunk if forward else self.chunks - 1 - forward_chunk
            sender = chunk * self.pp + stage
            receiver = sender + 1 if forward else sender - 1
            if 0 <= receiver <= last:
                tags.append(BoundaryTag(step, direction, sender, receiver, micro_batch))
        return tuple(tags)

    def received(self, step: int, stage: int, direction: Direction) -> tuple[BoundaryTag, ...]:
        """Returns what a stage receives that goes in a direction, in order."""
        towards = -1 if direction is Direction.FORWARD else 1
        sender = (stage + towards) % self.pp
        tags = self.sent(step, sender, direction)
        return tuple(tag for tag in tags if tag.receiver % self.pp == stage)
