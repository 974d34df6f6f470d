# SPDX-License-Identifier: Apache-2.0
"""Why a generation ended: the reasons of all processes, in a few bytes whatever their number."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from megatron_moevement.policy.number_runs import numbers_of, runs_of

MOST_RUNS = 128
"""Of ranks, for all reasons together: some two kilobytes."""


def reasons_in_short(
    reasons: Iterable[tuple[int, str]], order: Sequence[str], most_runs: int = MOST_RUNS
) -> list[list[Any]]:
    """Returns reasons with the runs of ranks that had them.

    Of several reasons of one rank the first in the order counts. Where there are too many runs,
    those of the last reasons are left out, and of one reason those of the last ranks.

    Args:
        reasons: rank and name of each, in any order.
        order: all names, the one that tells most first.
    """
    place = {name: number for number, name in enumerate(order)}
    found: dict[int, str] = {}
    for rank, name in reasons:
        if rank not in found or place[name] < place[found[rank]]:
            found[rank] = name
    short, left = [], most_runs
    for name in order:
        ranks = (rank for rank, own in found.items() if own == name)
        if runs := list(itertools.islice(runs_of(ranks), left)):
            short.append([name, runs])
            left -= len(runs)
    return short


def reason_of_each(short: Iterable[Sequence[Any]]) -> dict[int, str]:
    """Returns the reason of each rank that has one."""
    return {rank: name for name, runs in short for rank in numbers_of(runs)}
