# SPDX-License-Identifier: Apache-2.0
"""Group calls: what one thread has asked of NCCL since it opened a group of calls.

NCCL counts per thread how many groups are open (`ncclGroupDepth` in its group.cc). While one is
open, nothing that the thread asks for runs, on any communicator, and torch takes it for done: its
events are recorded on an empty stream. The count survives communicators and process groups.

Torch counts the same (`ncclActiveGroupCounter_`), but not down where a group ends with an error.
Before a communicator is made it closes as many groups as it counts, and opens them again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

_open = threading.local()


class NotOpenError(RuntimeError):
    """A group of calls is closed that is not open: NCCL's invalid usage."""


def depth() -> int:
    """Returns how many groups the calling thread has open."""
    return getattr(_open, "depth", 0)


def counted() -> int:
    """Returns how many torch takes for open."""
    return getattr(_open, "counted", 0)


def begin() -> None:
    """Opens one more."""
    _begin()
    _open.counted = counted() + 1


def defer(launch: Callable[[], object]) -> None:
    """Keeps a launch until the last group of the calling thread is closed."""
    _open.deferred = [*getattr(_open, "deferred", ()), launch]


def end() -> None:
    """Closes one; with the last one, all that was asked for meanwhile is launched.

    Raises:
        NotOpenError: none is open.
        DistBackendError: a communicator was aborted that something was asked of.
    """
    _end()
    _open.counted = counted() - 1


def forget() -> None:
    """Lets the calling thread be as a new one."""
    vars(_open).clear()


@contextlib.contextmanager
def closed() -> Iterator[None]:
    """Encloses the making of a communicator.

    Raises:
        NotOpenError: fewer groups are open than torch counts.
    """
    for _ in range(counted()):
        _end()
    yield
    for _ in range(counted()):
        _begin()


def _begin() -> None:
    _open.depth = depth() + 1


def _end() -> None:
    if not depth():
        raise NotOpenError("ncclGroupEnd: not in a group call.")
    _open.depth = depth() - 1
    if depth():
        return
    deferred = getattr(_open, "deferred", ())
    _open.deferred = []
    for launch in deferred:
        launch()
