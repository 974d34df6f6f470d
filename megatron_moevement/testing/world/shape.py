# SPDX-License-Identifier: Apache-2.0
"""The simulated job: operators on ranks and chunks, who reduces with whom, and what is sent."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator

from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.job.boundary import Direction
from megatron_moevement.policy.job.operators import Inventory, Operator, OperatorId, OperatorKind
from megatron_moevement.policy.job.ranks import Layout, LogicalRank
from megatron_moevement.policy.job.segments import Ends, coupled_stages, receivers_from
from megatron_moevement.policy.window.ordering import Ordering, order_operators
from megatron_moevement.policy.window.schedule import Window, WindowSchedule
from megatron_moevement.policy.window.window_planner import plan_window
from megatron_moevement.testing.world.scenario import Scenario


@dataclasses.dataclass(frozen=True)
class Part:
    """A model chunk on one rank.

    Attributes:
        number: place along the model, `chunk * PP + stage`.
        operators: what it consists of on this rank.
    """

    number: int
    operators: tuple[OperatorId, ...]


@dataclasses.dataclass(frozen=True)
class Shape:
    """What all ranks of a simulated job know about it; it never changes.

    Attributes:
        layout: sizes of the job.
        ends: whether the embedding is tied.
        micro_batches: per step and data-parallel rank.
        schedule: in which slot each operator is FULL, until another one is agreed on.
        parts: the model chunks of each rank.
        chunk_of: for each operator the chunk of its stage that it lies in.
        holders: for each operator the ranks that reduce its gradient together.
        groups: for each stage the ranks that step together with its ranks.
    """

    layout: Layout
    ends: Ends
    micro_batches: int
    schedule: WindowSchedule
    parts: dict[LogicalRank, tuple[Part, ...]]
    chunk_of: dict[OperatorId, int]
    holders: dict[OperatorId, tuple[LogicalRank, ...]]
    groups: tuple[tuple[LogicalRank, ...], ...]

    @functools.cached_property
    def last_part(self) -> int:
        """Number of the model chunk that computes the loss."""
        return self.layout.pp * self.layout.chunks - 1

    @functools.cached_property
    def pipelines(self) -> dict[LogicalRank, tuple[LogicalRank, ...]]:
        """For each rank the ranks of all stages with the same other coordinates."""
        return {
            rank: tuple(rank._replace(pp=stage) for stage in range(self.layout.pp))
            for rank in self.layout.ranks
        }

    @functools.cached_property
    def receivers(self) -> tuple[dict[Direction, int], ...]:
        """For each stage to which it sends, by direction."""
        return tuple(dict(receivers_from(self.layout, stage)) for stage in range(self.layout.pp))

    def slots_of(self, window: Window) -> Iterator[SlotKey]:
        """Yields all slots of a window, of all ranks."""
        for rank in self.layout.ranks:
            yield from (SlotKey(rank, window, slot) for slot in range(window.size))

    def sends(self, stage: int, direction: Direction) -> int:
        """Returns how many tensors a rank of a stage sends in a direction in one step."""
        parts = [chunk * self.layout.pp + stage for chunk in range(self.layout.chunks)]
        end = self.last_part if direction is Direction.FORWARD else 0
        return self.micro_batches * sum(part != end for part in parts)

    def part_stage(self, part: int) -> int:
        """Returns the stage that a model chunk lies on."""
        return part % self.layout.pp


@functools.lru_cache(maxsize=64)
def _shape(layout: Layout, ends: Ends, sizes: tuple[int, int, int], seed: int) -> Shape:
    experts_per_rank, window, micro_batches = sizes
    parts = {rank: _parts(layout, rank, experts_per_rank) for rank in layout.ranks}
    inventory = _inventory(parts, ends, random.Random(seed))  # noqa: S311  (reproducible)
    order = order_operators(inventory.operators, Ordering.INDEX)
    schedule = plan_window(inventory, order, window=window).schedule
    chunk_of = {
        operator: chunk
        for rank_parts in parts.values()
        for chunk, part in enumerate(rank_parts)
        for operator in part.operators
    }
    groups = tuple(
        tuple(
            rank
            for other in coupled_stages(layout, ends, stage)
            for rank in layout.stage_ranks(other)
        )
        for stage in range(layout.pp)
    )
    holders = dict(inventory.holders)
    return Shape(layout, ends, micro_batches, schedule, parts, chunk_of, holders, groups)


def shape_of(scenario: Scenario) -> Shape:
    """Returns the job of a scenario; its window comes from the real planner."""
    return _shape(
        scenario.layout,
        scenario.ends,
        (scenario.experts_per_rank, scenario.window, scenario.micro_batches),
        scenario.seed % 4,
    )


def _parts(layout: Layout, rank: LogicalRank, experts_per_rank: int) -> tuple[Part, ...]:
    """Returns one layer per chunk; the embedding before the first, the head after the last."""
    last = layout.pp * layout.chunks - 1
    parts = []
    for chunk in range(layout.chunks):
        number = chunk * layout.pp + rank.pp
        experts = layout.experts_of(rank, layout.ep * experts_per_rank)
        operators = [OperatorId(OperatorKind.EXPERT, number, expert) for expert in experts]
        operators.append(OperatorId(OperatorKind.GATE, number))
        operators.append(OperatorId(OperatorKind.NON_EXPERT, number))
        if number == 0:
            operators.append(OperatorId(OperatorKind.EMBEDDING))
        if number == last:
            operators.append(OperatorId(OperatorKind.HEAD))
        parts.append(Part(number, tuple(operators)))
    return tuple(parts)


def _inventory(
    parts: dict[LogicalRank, tuple[Part, ...]], ends: Ends, draw: random.Random
) -> Inventory:
    sizes: dict[OperatorId, int] = {}
    by_rank = {}
    for rank, chunks in parts.items():
        operators = []
        for operator in (operator for part in chunks for operator in part.operators):
            if operator not in sizes:
                sizes[operator] = draw.randrange(1, 9)
            operators.append(Operator(operator, 12 * sizes[operator], 2 * sizes[operator]))
        by_rank[rank] = tuple(operators)
    both = frozenset({OperatorId(OperatorKind.EMBEDDING), OperatorId(OperatorKind.HEAD)})
    return Inventory(by_rank, (both,) if ends is Ends.TIED else ())
