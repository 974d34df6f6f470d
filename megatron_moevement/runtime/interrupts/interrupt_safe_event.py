# SPDX-License-Identifier: Apache-2.0
"""Interrupt-safe event: one thread waits for what others change, and may be interrupted.

`threading.Condition` and `Event` take and leave their lock in methods written in Python. An
interrupt may come in between: the lock stays taken, and whoever tells of the next change waits for
ever. Queues in C have no such gap, nor has `with` on a `threading.Lock`.
"""

from __future__ import annotations

import contextlib
import queue
from datetime import timedelta


class InterruptSafeEvent:
    """Whether there was any since the last look; any number of threads tell, one waits."""

    def __init__(self) -> None:
        self._token: queue.SimpleQueue[None] = queue.SimpleQueue()

    def tell(self) -> None:
        """Says that something has changed, once the change can be seen."""
        if self._token.empty():
            self._token.put(None)

    def wait(self, timeout: timedelta) -> bool:
        """Waits for news; returns whether there was any since the last call."""
        try:
            self._token.get(timeout=timeout.total_seconds())
        except queue.Empty:
            return False
        with contextlib.suppress(queue.Empty):  # several may have told at once
            while True:
                self._token.get_nowait()
        return True
