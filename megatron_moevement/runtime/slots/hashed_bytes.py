# SPDX-License-Identifier: Apache-2.0
"""How much memory this process has read in order to compare it with its checksums."""

from __future__ import annotations

import threading


class HashedBytes:
    """Counts bytes of slots and of the upstream log; any thread adds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.total = 0

    def add(self, size_bytes: int) -> None:
        """Counts bytes that are read."""
        with self._lock:
            self.total += size_bytes


HASHED = HashedBytes()
"""Of this process, in all its generations; what arrives and what is captured is not counted."""
