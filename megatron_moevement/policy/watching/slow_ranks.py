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


@dataclasses.dataclass(frozen=True)
class SlowRank:
    """A rank that was slow for several steps in a row.

    Attributes:
        own_s: what it computed in the last of these steps, in seconds.
        median_s: the median of all ranks in that step.
    """

    rank: int
    own_s: float
    median_s: float


@dataclasses.dataclass(frozen=True)
class SlowRankWatch:
    """How often in a row each rank was slow.

    Attributes:
        factor: a rank is slow when it takes more than so many times the median.
        in_a_row: steps, for each rank; empty before the first step.
    """

    factor: float
    in_a_row: tuple[int, ...] = ()

    def after(self, own_s: Sequence[float]) -> tuple[SlowRankWatch, tuple[SlowRank, ...]]:
        """Learns of a step.

        Args:
            own_s: for each rank, how long it computed in the step, without its waits for others;
                empty where nobody knows.

        Returns:
            The watch behind the step, and the ranks that have become slow with it: each is told of
            once, and again when it was quick meanwhile.
        """
        if not own_s:
            return self, ()
        # Of two the one must not count for the other.
        median_s = min(own_s) if len(own_s) == 2 else statistics.median(own_s)
        before = self.in_a_row or (0,) * len(own_s)
        in_a_row = tuple(
            count + 1 if one > self.factor * median_s else 0
            for count, one in zip(before, own_s, strict=True)
        )
        slow = tuple(
            SlowRank(rank, own_s[rank], median_s)
            for rank, count in enumerate(in_a_row)
            if count == STEPS_IN_A_ROW
        )
        return dataclasses.replace(self, in_a_row=in_a_row), slow
