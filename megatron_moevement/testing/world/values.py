# SPDX-License-Identifier: Apache-2.0
"""History: values that are equal exactly when they were computed in the same way."""

from __future__ import annotations

from typing import Any


class History:
    """Numbers every computation by its name and its inputs.

    Two numbers are equal exactly when the whole chains of computations behind them are: this is
    what "the same bits" means in the simulated world. There are no collisions, and a number can be
    explained.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._computations: list[tuple[Any, ...]] = []

    def of(self, *computation: Any) -> int:
        """Returns the number of a computation: a name, then numbers of inputs and constants."""
        number = self._numbers.get(computation)
        if number is None:
            number = len(self._computations)
            self._numbers[computation] = number
            self._computations.append(computation)
        return number

    def explain(self, number: int, depth: int = 2) -> str:
        """Returns what a number was computed from, in as many levels as asked for."""
        name, *inputs = self._computations[number]
        if depth == 0 or not inputs:
            return f"{name}#{number}"
        parts = [
            self.explain(value, depth - 1)
            if isinstance(value, int) and position == 0 and value < number
            else str(value)
            for position, value in enumerate(inputs)
        ]
        return f"{name}({', '.join(parts)})"
