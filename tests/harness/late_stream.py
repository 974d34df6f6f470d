# SPDX-License-Identifier: Apache-2.0
"""A copy stream as bad as its promise allows: copies run late, in any order, up to the join."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from random import Random

import torch


class LateStream:
    """Holds copies back until somebody waits for them, then runs them in a random order."""

    checksum_threads = 2

    def __init__(self, seed: int, longest_wait_s: float = 0.005, join_s: float = 0.0) -> None:
        """Makes a stream; the same seed gives the same order.

        Args:
            seed: of the order.
            longest_wait_s: before each copy.
            join_s: before the first copy, once somebody waits.
        """
        self._random = Random(seed)  # noqa: S311  (no secret)
        self._longest_wait_s = longest_wait_s
        self._join_s = join_s
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.orders: list[tuple[int, ...]] = []

    def fork(self) -> Callable[[], None]:
        """Marks nothing: nothing is enqueued on the host."""
        return lambda: None

    def host_memory(self, size_bytes: int) -> torch.Tensor:
        """Returns memory like any other."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Takes copies down for later."""
        self._waiting += zip(sources, targets, strict=True)

    def join(self) -> None:
        """Runs all copies."""
        time.sleep(self._join_s)
        order = list(range(len(self._waiting)))
        self._random.shuffle(order)
        self.orders.append(tuple(order))
        for number in order:
            time.sleep(self._random.uniform(0, self._longest_wait_s))
            source, target = self._waiting[number]
            target.copy_(source)
        self._waiting.clear()
