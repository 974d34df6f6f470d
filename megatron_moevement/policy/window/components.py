# SPDX-License-Identifier: Apache-2.0
"""Components: the operators of a job as ordered columns of bytes, split into independent parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from operator import attrgetter

from megatron_moevement.policy.job.operators import Inventory, OperatorId
from megatron_moevement.policy.job.sharing import Column, SharedItems


@dataclasses.dataclass(frozen=True)
class OrderedColumn:
    """What one rank holds of a group, in the group's order.

    Attributes:
        column: the same in the inventory's order.
        places: of the items in `column`.
    """

    column: Column
    places: Sequence[int]

    @property
    def rank(self) -> int:
        """Number of the rank."""
        return self.column.rank

    @cached_property
    def full(self) -> list[int]:
        """FULL bytes of each item."""
        return list(map(self.column.full.__getitem__, self.places))

    @cached_property
    def compute(self) -> list[int]:
        """COMPUTE bytes of each item."""
        return list(map(self.column.compute.__getitem__, self.places))

    @cached_property
    def full_sums(self) -> list[int]:
        """FULL bytes of the first 0, 1, ... items."""
        return list(accumulate(map(self.column.full.__getitem__, self.places), initial=0))

    @cached_property
    def compute_sums(self) -> list[int]:
        """COMPUTE bytes of the first 0, 1, ... items."""
        return list(accumulate(map(self.column.compute.__getitem__, self.places), initial=0))


@dataclasses.dataclass(frozen=True)
class Group:
    """Items as in `SharedItems`, but in the order in which they should be FULL."""

    positions: list[int]
    columns: tuple[OrderedColumn, ...]


@dataclasses.dataclass(frozen=True)
class Component:
    """Ranks that share operators, directly or through others, and these operators.

    Components don't influence each other: pipeline stages are such, and expert-parallel ranks when
    nothing lies on both of them.

    Attributes:
        groups: the items by the ranks that hold them, those of many ranks first.
    """

    groups: tuple[Group, ...]

    @cached_property
    def num_items(self) -> int:
        """Number of items, hence of slots that can be of use."""
        return sum(len(group.positions) for group in self.groups)

    @cached_property
    def columns_by_rank(self) -> Mapping[int, list[OrderedColumn]]:
        """All columns of each rank."""
        by_rank: dict[int, list[OrderedColumn]] = {}
        for group in self.groups:
            for column in group.columns:
                by_rank.setdefault(column.rank, []).append(column)
        return by_rank

    @cached_property
    def largest_bytes(self) -> int:
        """FULL bytes of the largest item on any rank."""
        columns = (column.column for group in self.groups for column in group.columns)
        return max((column.largest_full for column in columns), default=0)

    @cached_property
    def totals(self) -> Sequence[tuple[int, float]]:
        """For each rank its FULL bytes and the smallest part that COMPUTE is of FULL."""
        return [
            (
                sum(column.column.full_total for column in columns),
                min(column.column.least_compute_part for column in columns),
            )
            for columns in self.columns_by_rank.values()
        ]


def split(inventory: Inventory, order: Sequence[OperatorId]) -> tuple[Component, ...]:
    """Puts the operators into their order and splits them into components.

    Args:
        order: every operator once, in the order in which they should be FULL. Tied ones stand
            where the last of them does.

    Returns:
        The components; they have no rank and no item in common.

    Raises:
        ValueError: the order lacks an operator of the inventory or has one too many.
    """
    numbers = _number(inventory, order)
    groups = [_in_order(shared, numbers) for shared in inventory.shared]
    return _connect(groups, len(inventory.ranks))


def _number(inventory: Inventory, order: Sequence[OperatorId]) -> list[int]:
    """Returns for each operator, in the inventory's order, where it stands in the order."""
    places = dict(zip(map(attrgetter("number"), order), range(len(order)), strict=True))
    num_operators = len(inventory.numbers)
    if len(order) != num_operators or len(places) != num_operators:
        raise ValueError(
            f"an order of {len(order)} operators, {len(places)} of them different, does not fit "
            f"an inventory of {num_operators}"
        )
    try:
        numbers = list(map(places.__getitem__, inventory.numbers))
    except KeyError as error:
        missing = min(inventory.operators.difference(order))
        raise ValueError(f"the order lacks {missing}") from error
    for tied in inventory.tied_positions:
        last = max(numbers[position] for position in tied)
        for position in tied:
            numbers[position] = last
    return numbers


def _in_order(shared: SharedItems, numbers: Sequence[int]) -> Group:
    """Returns what the same ranks hold, ascending by the operators' numbers in the order."""
    keys = list(map(numbers.__getitem__, shared.positions))
    places = sorted(range(len(keys)), key=keys.__getitem__)
    return Group(
        list(map(shared.positions.__getitem__, places)),
        tuple(OrderedColumn(column, places) for column in shared.columns),
    )


def _connect(groups: Sequence[Group], num_ranks: int) -> tuple[Component, ...]:
    """Joins groups that have ranks in common; what weighs nothing is a component of its own."""
    parent = list(range(num_ranks))
    for group in groups:
        for column in group.columns[1:]:
            parent[_root(parent, column.rank)] = _root(parent, group.columns[0].rank)
    joined: dict[int, list[Group]] = {}
    for group in groups:
        root = _root(parent, group.columns[0].rank) if group.columns else -1
        joined.setdefault(root, []).append(group)
    return tuple(Component(tuple(members)) for members in joined.values())


def _root(parent: list[int], rank: int) -> int:
    while parent[rank] != rank:
        parent[rank] = parent[parent[rank]]
        rank = parent[rank]
    return rank
