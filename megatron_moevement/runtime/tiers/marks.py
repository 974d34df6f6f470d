# SPDX-License-Identifier: Apache-2.0
"""Marks of ranks in a target: by them one rank sees whether it is where the others write, too."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from megatron_moevement.runtime.tiers.target import Target

_PREFIX = "marks-"
_SLICE_S = 0.05
"""Of a wait, in which no interrupt arrives."""

_BETWEEN_LOOKS_S = 0.25

T = TypeVar("T")


def leave_mark(target: Target, launch: str, rank: int) -> None:
    """Leaves the mark of a rank, for one launch.

    Raises:
        Exception: the target refuses.
    """
    with target.create(f"{_PREFIX}{launch}/{rank}") as file:
        file.write(b"%d" % rank)


def find_marks(target: Target, launch: str, left: Collection[int], looks_s: float) -> list[int]:
    """Returns the ranks whose marks are there.

    Args:
        left: the ranks that have left one.
        looks_s: how long to look for all of these.

    Raises:
        Exception: the target refuses.
    """
    until_s = time.monotonic() + looks_s
    while True:
        names = target.names(f"{_PREFIX}{launch}")
        found = [int(name) for name in names if name.isdecimal()]
        if set(left) <= set(found) or time.monotonic() > until_s:
            return found
        time.sleep(_BETWEEN_LOOKS_S)


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
