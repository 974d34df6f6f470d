# SPDX-License-Identifier: Apache-2.0
"""Curves over steps, of all ranks together, in bounded memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

POINTS = 1200
"""As many points has a curve at most: more than a screen has pixels for."""
_DIGITS = 6


@dataclasses.dataclass(frozen=True)
class _Point:
    count: int
    total: float
    low: float
    high: float
    rank: int
    """Of the highest value; the first rank of several."""

    def __add__(self, other: _Point) -> _Point:
        highest = min((self, other), key=lambda one: (-one.high, one.rank))
        return _Point(
            count=self.count + other.count,
            total=self.total + other.total,
            low=min(self.low, other.low),
            high=highest.high,
            rank=highest.rank,
        )


class Curve:
    """The lowest, mean and highest value of each stretch of steps, whatever the order they come in.

    Stretches begin with one step each, and double in length when there are more than `POINTS`.
    """

    def __init__(self) -> None:
        """Has no value yet."""
        self._stride = 1
        self._points: dict[int, _Point] = {}

    def add(self, step: int, value: Any, rank: int) -> None:
        """Adds the value of a step on a rank; what is no finite number is left out."""
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return
        self._put(step // self._stride, _Point(1, value, value, value, rank))
        while len(self._points) > POINTS:
            self._stride *= 2
            former, self._points = self._points, {}
            for place, point in former.items():
                self._put(place // 2, point)

    def document(self) -> Mapping[str, Any] | None:
        """Returns columns of numbers, by step; None where there is no value.

        `low` is left out where all values of each point are equal, then `rank` is, too.
        """
        if not self._points:
            return None
        places = sorted(self._points)
        points = [self._points[place] for place in places]
        found: dict[str, Any] = {
            "stride": self._stride,
            "steps": [place * self._stride for place in places],
            "mean": [_short(point.total / point.count) for point in points],
        }
        if any(point.low != point.high for point in points):
            found["low"] = [_short(point.low) for point in points]
            found["high"] = [_short(point.high) for point in points]
            found["rank"] = [point.rank for point in points]
        return found

    def _put(self, place: int, point: _Point) -> None:
        known = self._points.get(place)
        self._points[place] = point if known is None else known + point


def _short(value: float) -> float:
    """Returns a value with so many digits as a picture shows; whole numbers stay whole."""
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short.is_integer() else short
