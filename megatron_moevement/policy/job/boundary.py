# SPDX-License-Identifier: Apache-2.0
"""Stage boundaries: what crosses them, under which name it is logged, and between which stages."""

from __future__ import annotations

import dataclasses
from enum import Enum

from megatron_moevement.policy.job.ranks import Layout


class Direction(Enum):
    """Which way a tensor crosses a stage boundary."""

    FORWARD = "forward"
    """Activations, to the stage that computes the next layers."""

    BACKWARD = "backward"
    """Gradients, to the stage that computed the layers before."""


@dataclasses.dataclass(frozen=True)
class BoundaryTag:
    """The name of a logged boundary tensor: unique among all that a logical rank ever sends.

    Source: section 3.3, "tagged with iteration numbers and micro batch identifiers".

    Attributes:
        sender: number of the sending model chunk, counted along the model: `chunk * PP + stage`.
    """

    step: int
    direction: Direction
    sender: int
    receiver: int
    micro_batch: int


def is_ring(layout: Layout) -> bool:
    """Returns whether the last stage also sends to the first one: with interleaved chunks."""
    return layout.chunks > 1 and layout.pp > 1


def sender_stage(layout: Layout, receiver: int, direction: Direction) -> int | None:
    """Returns the stage from which a stage receives what goes in a direction, None at the ends."""
    stage = receiver - 1 if direction is Direction.FORWARD else receiver + 1
    if is_ring(layout):
        return stage % layout.pp
    return stage if 0 <= stage < layout.pp else None
