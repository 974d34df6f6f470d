# SPDX-License-Identifier: Apache-2.0
"""Small sets of combinations in which every two settings meet; standard library only."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from enum import Enum

Level = tuple[str, str]
"""A factor and one of its levels."""

Pair = tuple[Level, Level]
"""Two levels of two factors, in the order of the factors."""


class Ties(Enum):
    """Which level a factor takes where several bring as many pairs, or none brings any."""

    FIRST = "first"
    """The one that is listed first."""

    RAREST = "rarest"
    """The one that occurs in the fewest combinations so far."""


def cover_pairs(
    factors: Mapping[str, Sequence[str]],
    impossible: Collection[Pair] = (),
    ties: Ties = Ties.FIRST,
) -> list[dict[str, str]]:
    """Returns combinations such that any two levels of two factors occur together in one.

    Greedy: a combination starts with a pair that is missing yet, and each further factor takes the
    level that brings most missing pairs. The same factors always give the same combinations.

    Args:
        factors: the levels of each factor.
        impossible: pairs that never occur together; every other pair does.
        ties: what decides between levels that are as good.

    Raises:
        ValueError: a pair is in no combination without an impossible one.
    """
    missing = [pair for pair in pairs_of(factors) if pair not in impossible]
    rows: list[dict[str, str]] = []
    used: Counter[Level] = Counter()

    def worth(row: Mapping[str, str], added: Level) -> tuple[int, int, int]:
        rarity = -used[added] if ties is Ties.RAREST else 0
        return (*_gain(row, added, missing), rarity)

    while missing:
        row = dict(missing[0])
        for name in sorted(factors, key=lambda name: -len(factors[name])):
            if name not in row:
                levels = [
                    level
                    for level in factors[name]
                    if not any(_has({**row, name: level}, *pair) for pair in impossible)
                ]
                if not levels:
                    raise ValueError(f"no level of {name} goes with {row}")
                row[name] = max(levels, key=lambda level: worth(row, (name, level)))
        used.update(row.items())
        rows.append({name: row[name] for name in factors})
        missing = [(one, other) for one, other in missing if not _has(row, one, other)]
    return rows


def pairs_of(factors: Mapping[str, Sequence[str]]) -> list[Pair]:
    """Returns every two levels of two factors, in the order of the factors."""
    return [
        ((one, one_level), (other, other_level))
        for one, other in itertools.combinations(factors, 2)
        for one_level, other_level in itertools.product(factors[one], factors[other])
    ]


def _gain(
    row: Mapping[str, str], added: Level, missing: Sequence[tuple[Level, Level]]
) -> tuple[int, int]:
    """Returns how many missing pairs a level completes, then how many it has a part in."""
    name, level = added
    extended = {**row, name: level}
    parts = [pair for pair in missing if added in pair]
    return sum(_has(extended, *pair) for pair in parts), len(parts)


def _has(row: Mapping[str, str], one: Level, other: Level) -> bool:
    return row.get(one[0]) == one[1] and row.get(other[0]) == other[1]
