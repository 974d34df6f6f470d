# SPDX-License-Identifier: Apache-2.0
"""Tokens: what the routers of a simulated rank send to which expert."""

from __future__ import annotations

import random
from collections.abc import Sequence

from megatron_moevement.policy.job.operators import OperatorKind
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.testing.world.scenario import Scenario
from megatron_moevement.testing.world.shape import Shape

Counts = tuple[int, ...]
"""Tokens of all experts of the job, in the order of layer and number."""


class Tokens:
    """Counts of each rank and step: drawn, so a replay counts what was counted the first time."""

    def __init__(self, scenario: Scenario, shape: Shape) -> None:
        operators = sorted(shape.schedule.inventory.operators)
        self._experts = [one for one in operators if one.kind is OperatorKind.EXPERT]
        self._layers = {
            rank: {one.layer for part in parts for one in part.operators}
            for rank, parts in shape.parts.items()
        }
        self._routings = scenario.conditions.routings
        draw = random.Random(f"tokens {scenario.seed}")  # noqa: S311  (reproducible)
        self._popularity = [
            [draw.choice((1, 3, 10, 40)) for _ in self._experts] for _ in (0, *self._routings)
        ]

    @property
    def nothing(self) -> Counts:
        """Counts without any step."""
        return (0,) * len(self._experts)

    def counts(self, rank: LogicalRank, step: int) -> Counts:
        """Returns what a rank sends to the experts of its layers in a step."""
        popularity = self._popularity[sum(routing <= step for routing in self._routings)]
        layers, own = self._layers[rank], 5 * rank.dp + 3 * rank.ep
        return tuple(
            popular * (16 + (own + step + place) % 5) if expert.layer in layers else 0
            for place, (expert, popular) in enumerate(zip(self._experts, popularity, strict=True))
        )

    def of_all(self, ranks: Sequence[LogicalRank], steps: range) -> Counts:
        """Returns what ranks send together in some steps."""
        return added(self.nothing, *(self.counts(rank, step) for rank in ranks for step in steps))


def added(*counts: Counts) -> Counts:
    """Returns the sums, expert by expert."""
    return tuple(map(sum, zip(*counts, strict=True)))
