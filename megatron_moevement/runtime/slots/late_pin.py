# SPDX-License-Identifier: Apache-2.0
"""Pinning that nobody waits for: it takes seconds for each ten gigabytes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from megatron_moevement.errors import UserError

logger = logging.getLogger(__name__)


class LatePin:
    """Makes memory a target of asynchronous copies, on a thread of its own."""

    def __init__(self, pin: Callable[[memoryview], Callable[[], None]], memory: memoryview) -> None:
        """Begins; where the system does not let so much memory be locked, it stays as it is.

        Args:
            pin: makes memory such a target; returns what undoes it.
        """
        self._unpin: Callable[[], None] | None = None
        self._thread = threading.Thread(
            target=self._run, args=(pin, memory), name="late-pin", daemon=True
        )
        self._thread.start()

    def undo(self) -> None:
        """Waits until it has ended, and undoes it; any thread may call it."""
        self._thread.join()
        if self._unpin is not None:
            self._unpin()

    def _run(self, pin: Callable[[memoryview], Callable[[], None]], memory: memoryview) -> None:
        try:
            self._unpin = pin(memory)
        except UserError as error:
            logger.warning("copies into memory that is not pinned take longer: %s", str(error))
