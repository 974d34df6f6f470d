# SPDX-License-Identifier: Apache-2.0
"""Sharing: which items lie on the same ranks and what they weigh there, whatever their order.

Planning goes over a hundred thousand operators; loops that can run in C do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from itertools import compress
from operator import truediv


@dataclasses.dataclass(frozen=True)
class Column:
    """What one rank holds of a group: FULL and COMPUTE bytes of each item."""

    rank: int
    full: list[int]
    compute: list[int]

    @cached_property
    def full_total(self) -> int:
        """FULL bytes of all items."""
        return sum(self.full)

    @cached_property
    def largest_full(self) -> int:
        """FULL bytes of the largest item."""
        return max(self.full, default=0)

    @cached_property
    def least_compute_part(self) -> float:
        """The smallest part that COMPUTE is of FULL in any item, at most 1."""
        full, compute = self.full, self.compute
        if 0 in full:
            compute = list(compress(compute, full))
            full = list(compress(full, full))
        return min(1.0, min(map(truediv, compute, full), default=1.0))


@dataclasses.dataclass(frozen=True)
class SharedItems:
    """Items that weigh something on the same ranks.

    An item is what needs one slot: an operator, or several that are tied. It has the position of
    the first of them.

    Attributes:
        positions: of the items, ascending.
    """

    positions: Sequence[int]
    columns: tuple[Column, ...]


@dataclasses.dataclass(frozen=True)
class Shards:
    """What one rank holds: positions of its operators among those of the job, and their bytes."""

    positions: Sequence[int]
    full: Sequence[int]
    compute: Sequence[int]


def share(
    shards: Sequence[Shards], num_operators: int, tied: Sequence[Sequence[int]]
) -> tuple[SharedItems, ...]:
    """Returns all items by the ranks that hold them, those of many ranks first.

    Args:
        tied: sets of positions that are one item.
    """
    first = list(range(num_operators))
    for positions in tied:
        for position in positions:
            first[position] = min(positions)
    held = [_weigh(part, first if tied else None) for part in shards]
    holders, sets = _holder_sets(held, num_operators)
    members: list[list[int]] = [[] for _ in sets]
    for position, holder in enumerate(holders):
        if first[position] == position:
            members[holder].append(position)
    by_size = sorted(range(len(sets)), key=lambda holder: (-len(sets[holder]), sets[holder]))
    return tuple(
        SharedItems(
            members[holder],
            tuple(held[rank].column(rank, members[holder]) for rank in sets[holder]),
        )
        for holder in by_size
        if members[holder]
    )


@dataclasses.dataclass(frozen=True)
class _Held:
    """What one rank holds, by the position of the item; what weighs nothing is left out."""

    full: dict[int, int]
    compute: dict[int, int]

    def column(self, rank: int, positions: Sequence[int]) -> Column:
        """Returns what the rank holds of some items."""
        full, compute = self.full.__getitem__, self.compute.__getitem__
        return Column(rank, list(map(full, positions)), list(map(compute, positions)))


def _weigh(part: Shards, first: Sequence[int] | None) -> _Held:
    """Returns what a rank's items weigh; tied operators that it holds both are added up."""
    positions = part.positions
    if first is not None:
        positions = list(map(first.__getitem__, positions))
    full = dict(zip(positions, part.full, strict=True))
    compute = dict(zip(positions, part.compute, strict=True))
    if len(full) < len(positions):
        full, compute = dict.fromkeys(full, 0), dict.fromkeys(full, 0)
        for position, large, small in zip(positions, part.full, part.compute, strict=True):
            full[position] += large
            compute[position] += small
    if 0 in part.full:
        for position in [p for p, large in full.items() if not (large or compute[p])]:
            del full[position], compute[position]
    return _Held(full, compute)


def _holder_sets(
    held: Sequence[_Held], num_operators: int
) -> tuple[list[int], list[tuple[int, ...]]]:
    """Returns for each position the number of its item's set of ranks, and these sets.

    Sets are numbered as they are met, by the set that they extend and the rank that they add.
    """
    sets: list[tuple[int, ...]] = [()]
    holders = [0] * num_operators
    for rank, items in enumerate(held):
        formers = list(map(holders.__getitem__, items.full))
        extended = {former: len(sets) + i for i, former in enumerate(dict.fromkeys(formers))}
        sets += [(*sets[former], rank) for former in extended]
        for position, former in zip(items.full, formers, strict=True):
            holders[position] = extended[former]
    return holders, sets
