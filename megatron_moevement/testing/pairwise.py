"""Small sets of combinations in which every two settings meet; standard library only."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

Level = tuple[str, str]
"""A factor and one of its levels."""


def cover_pairs(factors: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Returns combinations such that any two levels of two factors occur together in one.

    Greedy: a combination starts with a pair that is missing yet, and each further factor takes the
    level that brings most missing pairs. The same factors always give the same combinations.

    Args:
        factors: the levels of each factor.
    """
    missing = _pairs_of(factors)
    rows: list[dict[str, str]] = []
    while missing:
        row = dict(missing[0])
        for name in sorted(factors, key=lambda name: -len(factors[name])):
            if name not in row:
                row[name] = max(factors[name], key=lambda level: _gain(row, (name, level), missing))
        rows.append({name: row[name] for name in factors})
        missing = [(one, other) for one, other in missing if not _has(row, one, other)]
    return rows


def _pairs_of(factors: Mapping[str, Sequence[str]]) -> list[tuple[Level, Level]]:
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
