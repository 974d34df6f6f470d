# SPDX-License-Identifier: Apache-2.0
"""Marks of ranks in a target: by them one rank sees whether it is where the others write, too."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from megatron_moevement.runtime.tiers.target import Target

_PREFIX = "marks-"
_SLICE_S = 0.05
"""Of a wait, in which no interrupt arrives."""

T = TypeVar("T")


def leave_mark(target: Target, launch: str, rank: int) -> None:
    """Leaves the mark of a rank, for one launch.

    Raises:
        Exception: the target refuses.
    """
    with target.create(f"{_PREFIX}{launch}/{rank}") as file:
        file.write(b"%d" % rank)


def marked(target: Target, launch: str) -> list[int]:
    """Returns the ranks whose marks are there.

    Raises:
        Exception: the target refuses.
    """
    return [int(name) for name in target.names(f"{_PREFIX}{launch}") if name.isdecimal()]


def remove_marks(target: Target) -> None:
    """Removes the marks of all launches: one that was killed has left its own.

    Raises:
        Exception: the target refuses.
    """
    for name in target.names():
        if name.startswith(_PREFIX):
            target.remove(name)


class _Outcome(Generic[T]):
    """What a call came to: a value, or why there is none."""

    def __init__(self) -> None:
        self.values: queue.SimpleQueue[tuple[T | None, str | None]] = queue.SimpleQueue()

    def of(self, call: Callable[[], T]) -> None:
        """Makes the call; a thread of its own does."""
        try:
            self.values.put((call(), None))
        except Exception as error:  # noqa: BLE001  (libraries of fsspec raise what they like)
            self.values.put((None, f"{type(error).__name__}: {error}"))


def attempt(call: Callable[[], T], patience_s: float) -> tuple[T | None, str | None]:
    """Returns what a call of a target returns, or why it has returned nothing in time.

    A call that hangs is left to its thread, which ends with the process.
    """
    outcome = _Outcome[T]()
    threading.Thread(target=outcome.of, args=(call,), name="tier-marks", daemon=True).start()
    until_s = time.monotonic() + patience_s
    while time.monotonic() < until_s:
        with contextlib.suppress(queue.Empty):
            return outcome.values.get(timeout=_SLICE_S)
    return None, f"no answer within {patience_s:.0f} s"
