# SPDX-License-Identifier: Apache-2.0
"""Virtual time: events in the order of their times, without waiting."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """A queue of events; of two at the same time the one that was planned first comes first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._planned = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def after(self, delay: float, action: Callable[..., None], *arguments: Any) -> None:
        """Plans an action `delay` units of time from now."""
        self._planned += 1
        heapq.heappush(self._events, (self.now + delay, self._planned, action, arguments))

    def pop(self) -> tuple[Callable[..., None], tuple[Any, ...]] | None:
        """Moves on to the next event and returns it, None when nothing is planned."""
        if not self._events:
            return None
        self.now, _, action, arguments = heapq.heappop(self._events)
        return action, arguments
