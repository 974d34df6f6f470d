# SPDX-License-Identifier: Apache-2.0
"""A call that may hang, as one to a file system that does not answer, and a limit for the wait."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

_SLICE_S = 0.05
"""Of a wait, in which no interrupt arrives."""

T = TypeVar("T")


class _Outcome(Generic[T]):
    """What a call came to: a value, or why there is none."""

    def __init__(self) -> None:
        self.values: queue.SimpleQueue[tuple[T | None, str | None]] = queue.SimpleQueue()

    def of(self, call: Callable[[], T]) -> None:
        """Makes the call; a thread of its own does."""
        try:
            self.values.put((call(), None))
        except Exception as error:  # noqa: BLE001  (whatever it is, it is an answer)
            self.values.put((None, f"{type(error).__name__}: {error}"))


def attempt(call: Callable[[], T], patience_s: float) -> tuple[T | None, str | None]:
    """Returns what a call returns, or why it has returned nothing in time.

    A call that hangs is left to its thread, which ends with the process.
    """
    outcome = _Outcome[T]()
    threading.Thread(target=outcome.of, args=(call,), name="attempt", daemon=True).start()
    until_s = time.monotonic() + patience_s
    while time.monotonic() < until_s:
        with contextlib.suppress(queue.Empty):
            return outcome.values.get(timeout=_SLICE_S)
    return None, f"no answer within {patience_s:.0f} s"
