# SPDX-License-Identifier: Apache-2.0
"""Runs of numbers: many that follow each other are as short in a document as few."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def runs_of(numbers: Iterable[int]) -> Iterator[list[int]]:
    """Yields the first and last number of each run of consecutive ones, ascending."""
    run: list[int] = []
    for number in sorted(numbers):
        if run and number == run[1] + 1:
            run[1] = number
            continue
        if run:
            yield run
        run = [number, number]
    if run:
        yield run


def numbers_of(runs: Iterable[Sequence[int]]) -> list[int]:
    """Returns the numbers of runs, in their order."""
    return [number for first, last in runs for number in range(first, last + 1)]
