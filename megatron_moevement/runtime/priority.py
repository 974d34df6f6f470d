# SPDX-License-Identifier: Apache-2.0
"""Priority of the threads that work beside training."""

from __future__ import annotations

import os
import threading

BACKGROUND_NICE = 10
"""A tenth of the share of a core that a training thread gets where both want the same core."""


_SLOT_THREADS: set[int] = set()
"""Native ids of threads of this process, also of some that have ended."""


def lower_priority(*, for_slots: bool = True) -> None:
    """Lowers the calling thread's priority for good, so that it takes cores that training leaves.

    Where training leaves none, it gets its share later: training waits for it then, and only then.
    A thread whose priority is as low already stays as it is.

    Args:
        for_slots: whether its work grows with the bytes of slots.
    """
    thread = threading.get_native_id()  # Linux: each thread has its own
    if os.getpriority(os.PRIO_PROCESS, thread) < BACKGROUND_NICE:
        os.setpriority(os.PRIO_PROCESS, thread, BACKGROUND_NICE)
    if for_slots:
        _SLOT_THREADS.add(thread)


def works_for_slots(thread: int) -> bool:
    """Returns whether a thread, by its native id, works for slots with what training leaves.

    In a process that begins with such a priority no thread does.
    """
    if thread not in _SLOT_THREADS or (niceness := _niceness(thread)) is None:
        return False
    return niceness >= BACKGROUND_NICE > os.getpriority(os.PRIO_PROCESS, os.getpid())


def may_train(thread: int) -> bool:
    """Returns whether a thread, by its native id, has the priority of those that train."""
    niceness = _niceness(thread)
    return niceness is not None and niceness < BACKGROUND_NICE


def _niceness(thread: int) -> int | None:
    try:
        return os.getpriority(os.PRIO_PROCESS, thread)
    except ProcessLookupError:  # it has ended
        return None
