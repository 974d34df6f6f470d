# SPDX-License-Identifier: Apache-2.0
"""Who writes into the rings of a process: one slot at a time into each, over any connections."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

from megatron_moevement.policy.job.ranks import LogicalRank


class Arrivals:
    """The slots that arrive; threads of the server call it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._transfers: dict[LogicalRank, str] = {}
        self._writers: Counter[LogicalRank] = Counter()

    @contextlib.contextmanager
    def taking(self, owner: LogicalRank, transfer: str) -> Iterator[None]:
        """Waits until nobody takes in another slot of the owner, and keeps others waiting."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._writers[owner] or self._transfers[owner] == transfer
            )
            self._transfers[owner] = transfer
            self._writers[owner] += 1
        try:
            yield
        finally:
            with self._changed:
                self._writers[owner] -= 1
                self._changed.notify_all()
