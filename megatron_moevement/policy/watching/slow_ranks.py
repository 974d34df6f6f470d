# SPDX-License-Identifier: Apache-2.0
"""Slow ranks: who takes much longer than the others to compute its part of a step.

In a step all wait for each other, so all take equally long. What tells them apart is the time in
which a rank did not wait. A slow rank is told about; nothing else follows from it.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

STEPS_IN_A_ROW = 3
"""One slow step says nothing: a machine does other things as well."""

QUICK_STEPS_IN_A_ROW = 10
"""As many a slow rank must be quick before it counts as quick, and may be told of again."""

_FLOOR_S = 0.25
"""What a rank takes longer than the median rank at least: less than that costs nobody anything."""


@dataclasses.dataclass(frozen=True)
class ChangedRank:
    """A rank that has become slow, or quick again.

    Attributes:
        own_s: what it computed in the last step, in seconds.
        median_s: the median of all ranks in that step.
        is_slow: what it is now.
    """

    rank: int
    own_s: float
    median_s: float
    is_slow: bool = True


@dataclasses.dataclass(frozen=True)
class SlowRankWatch:
    """Which ranks are slow, and for how long each was the contrary.

    A rank becomes slow above one limit and quick below a lower one, so that one that is near a
    limit is not told of again and again.

    Attributes:
        factor: a rank is slow when it takes more than so many times the median.
        slow: the ranks that are.
        against: for each rank, steps in a row that speak against what it is; empty before the
            first step.
    """

    factor: float
    slow: frozenset[int] = frozenset()
    against: tuple[int, ...] = ()

    def after(self, own_s: Sequence[float]) -> tuple[SlowRankWatch, tuple[ChangedRank, ...]]:
        """Learns of a step.

        Args:
            own_s: for each rank, how long it computed in the step, without its waits for others;
                empty where nobody knows.

        Returns:
            The watch behind the step, and the ranks that have changed with it.
        """
        if not own_s:
            return self, ()
        # Of two the one must not count for the other.
        median_s = min(own_s) if len(own_s) == 2 else statistics.median(own_s)
        slow_above_s = max(self.factor * median_s, median_s + _FLOOR_S)
        quick_below_s = (median_s + slow_above_s) / 2
        against, changed = [], []
        for rank, before in enumerate(self.against or (0,) * len(own_s)):
            is_slow = rank in self.slow
            differs = own_s[rank] < quick_below_s if is_slow else own_s[rank] > slow_above_s
            against.append(before + 1 if differs else 0)
            if against[rank] == (QUICK_STEPS_IN_A_ROW if is_slow else STEPS_IN_A_ROW):
                against[rank] = 0
                changed.append(ChangedRank(rank, own_s[rank], median_s, not is_slow))
        slow = self.slow.symmetric_difference(one.rank for one in changed)
        return SlowRankWatch(self.factor, slow, tuple(against)), tuple(changed)
