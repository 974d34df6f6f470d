"""Components: the operators of a job as numbered columns of bytes, split into independent parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate

from megatron_moevement.policy.operators import Inventory, Operator, OperatorId


@dataclasses.dataclass(frozen=True)
class Column:
    """What one rank holds of a group, item by item.

    Attributes:
        rank: number of the rank.
        full: FULL bytes of each item.
        compute: COMPUTE bytes of each item.
    """

    rank: int
    full: list[int]
    compute: list[int]

    @cached_property
    def full_sums(self) -> list[int]:
        """FULL bytes of the first 0, 1, ... items."""
        return list(accumulate(self.full, initial=0))

    @cached_property
    def compute_sums(self) -> list[int]:
        """COMPUTE bytes of the first 0, 1, ... items."""
        return list(accumulate(self.compute, initial=0))

    @cached_property
    def least_compute_part(self) -> float:
        """The smallest part that COMPUTE is of FULL in any item, at most 1."""
        shares = set(zip(self.full, self.compute, strict=True))
        return min((min(c / f, 1.0) for f, c in shares if f), default=1.0)


@dataclasses.dataclass(frozen=True)
class Group:
    """Items that weigh something on the same ranks, in their order.

    An item is what needs one slot: an operator, or several that are tied.

    Attributes:
        items: numbers of the items, ascending in their order.
        columns: one for each rank that holds them.
    """

    items: list[int]
    columns: tuple[Column, ...]


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
        return sum(len(group.items) for group in self.groups)

    @cached_property
    def columns_by_rank(self) -> Mapping[int, list[Column]]:
        """All columns of each rank."""
        by_rank: dict[int, list[Column]] = {}
        for group in self.groups:
            for column in group.columns:
                by_rank.setdefault(column.rank, []).append(column)
        return by_rank

    @cached_property
    def largest_bytes(self) -> int:
        """FULL bytes of the largest item on any rank."""
        columns = (column for group in self.groups for column in group.columns)
        return max((max(column.full) for column in columns), default=0)

    @cached_property
    def totals(self) -> Sequence[tuple[int, float]]:
        """For each rank its FULL bytes and the smallest part that COMPUTE is of FULL."""
        return [
            (
                sum(column.full_sums[-1] for column in columns),
                min(column.least_compute_part for column in columns),
            )
            for columns in self.columns_by_rank.values()
        ]


@dataclasses.dataclass(frozen=True)
class Components:
    """The operators of a job, numbered and split.

    Attributes:
        numbers: the item that each operator belongs to.
        parts: the components; they have no rank and no item in common.
    """

    numbers: Mapping[OperatorId, int]
    parts: tuple[Component, ...]


def split(inventory: Inventory, order: Sequence[OperatorId]) -> Components:
    """Numbers the operators in their order and splits them into components.

    Ranks whose operators are one and the same tuple, as replicas without sharding may be, count as
    one: they weigh the same in every slot.

    Args:
        inventory: the operators and their bytes on each rank.
        order: every operator once, in the order in which they should be FULL. Tied ones stand
            where the last of them does.

    Raises:
        ValueError: the order lacks an operator of the inventory or has one too many.
    """
    numbers = _number(inventory, order)
    distinct = {id(inventory.by_rank[rank]): inventory.by_rank[rank] for rank in inventory.ranks}
    parts = list(distinct.values())
    try:
        items = [[numbers[operator.id] for operator in part] for part in parts]
    except KeyError as error:
        raise ValueError(f"the order lacks {error.args[0]}") from error
    holders, sets = _holder_sets(parts, items, len(order))
    columns: list[list[Column]] = [[] for _ in sets]
    for rank, part in enumerate(parts):
        for holder, column in _columns(rank, part, items[rank], holders).items():
            columns[holder].append(column)
    members: list[list[int]] = [[] for _ in sets]
    for item in sorted(set(numbers.values())):
        members[holders[item]].append(item)
    by_size = sorted(range(len(sets)), key=lambda holder: (-len(sets[holder]), sets[holder]))
    groups = [Group(members[h], tuple(columns[h])) for h in by_size if members[h]]
    return Components(numbers, _connect(groups, len(parts)))


def _number(inventory: Inventory, order: Sequence[OperatorId]) -> dict[OperatorId, int]:
    numbers = {operator: number for number, operator in enumerate(order)}
    num_operators = len(inventory.sorted_operators)
    if len(order) != num_operators or len(numbers) != num_operators:
        raise ValueError(
            f"an order of {len(order)} operators, {len(numbers)} of them different, does not fit "
            f"an inventory of {num_operators}"
        )
    for tied in inventory.tied:
        last = max(numbers[operator] for operator in tied)
        numbers.update(dict.fromkeys(tied, last))
    return numbers


def _holder_sets(
    parts: Sequence[Sequence[Operator]], items: Sequence[Sequence[int]], num_items: int
) -> tuple[list[int], list[tuple[int, ...]]]:
    """Returns for each item the number of its set of ranks, and these sets.

    Sets are numbered as they are met, by the set that they extend and the rank that they add.
    """
    sets: list[tuple[int, ...]] = [()]
    holders = [0] * num_items
    for rank, (part, numbers) in enumerate(zip(parts, items, strict=True)):
        extended: dict[int, int] = {}
        added: set[int] = set()
        for operator, item in zip(part, numbers, strict=True):
            former = holders[item]
            if former in added or not (operator.full_bytes or operator.compute_bytes):
                continue
            larger = extended.get(former)
            if larger is None:
                larger = extended[former] = len(sets)
                added.add(larger)
                sets.append((*sets[former], rank))
            holders[item] = larger
    return holders, sets


def _columns(
    rank: int, part: Sequence[Operator], items: Sequence[int], holders: Sequence[int]
) -> dict[int, Column]:
    """Returns a rank's column of each set of ranks that it is in; tied operators are added up."""
    full = [operator.full_bytes for operator in part]
    compute = [operator.compute_bytes for operator in part]
    places: dict[int, list[int]] = {}
    for place in sorted(range(len(items)), key=items.__getitem__):
        if full[place] or compute[place]:
            holder = holders[items[place]]
            if holder in places:
                places[holder].append(place)
            else:
                places[holder] = [place]
    columns = {}
    for holder, chosen in places.items():
        column = Column(rank, [full[place] for place in chosen], [compute[p] for p in chosen])
        columns[holder] = _add_tied(column, [items[place] for place in chosen])
    return columns


def _add_tied(column: Column, items: Sequence[int]) -> Column:
    """Adds up the bytes of neighbours that are one item."""
    if len(set(items)) == len(items):
        return column
    full: dict[int, int] = {}
    compute: dict[int, int] = {}
    for item, large, small in zip(items, column.full, column.compute, strict=True):
        full[item] = full.get(item, 0) + large
        compute[item] = compute.get(item, 0) + small
    return Column(column.rank, list(full.values()), list(compute.values()))


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
