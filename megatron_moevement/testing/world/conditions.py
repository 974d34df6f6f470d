# SPDX-License-Identifier: Apache-2.0
"""Conditions: how fast slots travel and where tokens go, as it changes while a job trains."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from enum import Enum
from typing import Any

from megatron_moevement.policy.window.ordering import Ordering
from megatron_moevement.policy.window.weight_gradients import ExpertKernels


class Cores(Enum):
    """Whether captures find cores."""

    IDLE = "idle"
    TAKEN = "taken"
    """They are busy: what captures take, training waits for."""
    YIELDED = "yielded"
    """They are busy by what gives way to training, which does not wait for them."""


@dataclasses.dataclass(frozen=True)
class LinkSpeed:
    """How fast a rank sends from a step on.

    Attributes:
        step: that is committed.
        rank: its place among all ranks, modulo their number; -1 for all of them.
        percent: of the state of the largest rank that it sends to a holder within an iteration.
    """

    step: int
    rank: int
    percent: int


@dataclasses.dataclass(frozen=True)
class Conditions:
    """What a job chooses its schedules by.

    Attributes:
        limits: the smallest and the largest W, where it is chosen; None: nothing is measured.
        ordering: what experts are ordered by; by index nothing is counted.
        kernels: that compute experts.
        speeds: of links, ascending by step; the first of all ranks from the first step on.
        routings: steps from which on tokens go to other experts.
        burden_percent: of an iteration, by which a step is longer that captures the state of the
            largest rank; others in proportion. Where cores are yielded, no step is longer.
        cores: what ranks measure of that.
    """

    limits: tuple[int, int] | None = None
    ordering: Ordering = Ordering.INDEX
    kernels: ExpertKernels = ExpertKernels.EACH
    speeds: tuple[LinkSpeed, ...] = ()
    routings: tuple[int, ...] = ()
    burden_percent: int = 0
    cores: Cores = Cores.IDLE

    @property
    def measures(self) -> bool:
        """Whether W is chosen by what is measured."""
        return self.limits is not None

    @property
    def counts_tokens(self) -> bool:
        """Whether tokens are counted."""
        return self.ordering is not Ordering.INDEX

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> Conditions:
        """Returns the conditions that a scenario has as JSON."""
        limits = document["limits"]
        return cls(
            None if limits is None else (limits[0], limits[1]),
            Ordering(document["ordering"]),
            ExpertKernels(document["kernels"]),
            tuple(LinkSpeed(**speed) for speed in document["speeds"]),
            tuple(document["routings"]),
            document.get("burden_percent", 0),
            Cores(document.get("cores", Cores.IDLE.value)),
        )


UNCHANGING = Conditions()
"""By index, and without measurements."""

_PERCENT = (12, 35, 60, 150, 400, 1200)
_BURDEN_PERCENT = 10


def draw_routing(draw: random.Random, steps: int) -> Conditions:
    """Draws where tokens go; W is not chosen."""
    orderings = [each for each in Ordering if each is not Ordering.INDEX]
    return Conditions(
        ordering=draw.choice((Ordering.INDEX, *orderings)),
        kernels=draw.choice(list(ExpertKernels)),
        routings=tuple(sorted(draw.sample(range(1, steps), min(draw.randrange(3), steps - 1)))),
    )


def draw_all(draw: random.Random, steps: int, first_window: int) -> Conditions:
    """Draws where tokens go, and links that become slower and faster, of some ranks or of all.

    Captures make steps longer where links stay as they are, so that these alone move W.
    """
    speeds = [LinkSpeed(0, -1, draw.choice(_PERCENT))]
    for step in sorted(draw.sample(range(1, steps), draw.choice((0, 1, 1, 2)))):
        speeds.append(LinkSpeed(step, draw.choice((-1, draw.randrange(64))), draw.choice(_PERCENT)))
    return dataclasses.replace(
        draw_routing(draw, steps),
        limits=(draw.choice((1, 1, first_window)), max(first_window, draw.choice((2, 3, 4)))),
        speeds=tuple(speeds),
        burden_percent=_BURDEN_PERCENT if len(speeds) == 1 else 0,
        cores=draw.choice((Cores.IDLE, Cores.IDLE, Cores.TAKEN, Cores.YIELDED)),
    )
