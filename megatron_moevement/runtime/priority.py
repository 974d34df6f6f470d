# SPDX-License-Identifier: Apache-2.0
"""Priority of the threads that work beside training."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading
from datetime import timedelta

BACKGROUND_NICE = 10
"""A tenth of the share of a core that a training thread gets where both want the same core."""
BACKGROUND_SLICE = timedelta(milliseconds=8)
"""Longer than any that Linux gives by itself (2.8 ms). From 6.12 on a thread that wakes up takes a
core at once from one with longer slices; else it may wait until the other one's slice has ended."""

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""`struct sched_attr`: size, policy, flags, nice, priority, runtime, deadline, period."""
_KEEP_POLICY = 0x08
_LIBC = ctypes.CDLL(None)


def lower_priority() -> None:
    """Lowers the calling thread's priority for good, so that it takes cores that training leaves.

    Where training leaves none, it gets its share later: training waits for it then, and only then.
    A thread whose priority is as low already stays as it is.

    Source: sched(7), sched_setattr(2).
    """
    thread = threading.get_native_id()  # Linux: each thread has its own
    if os.getpriority(os.PRIO_PROCESS, thread) < BACKGROUND_NICE:
        os.setpriority(os.PRIO_PROCESS, thread, BACKGROUND_NICE)
        _lengthen_slices(thread)


def is_lowered(thread: int) -> bool:
    """Returns whether a thread of this process, by its native id, is to take what training leaves.

    In a process that begins with such a priority no thread is.
    """
    try:
        niceness = os.getpriority(os.PRIO_PROCESS, thread)
    except ProcessLookupError:  # it has ended
        return False
    return niceness >= BACKGROUND_NICE > os.getpriority(os.PRIO_PROCESS, os.getpid())


def _lengthen_slices(thread: int) -> None:
    """Asks for longer slices; an older kernel gives none, and a sandbox may refuse."""
    number = _SCHED_SETATTR.get(platform.machine())
    if number is not None:
        slice_ns = BACKGROUND_SLICE // timedelta(microseconds=1) * 1000
        wanted = _ATTRIBUTES.pack(
            _ATTRIBUTES.size, 0, _KEEP_POLICY, BACKGROUND_NICE, 0, slice_ns, 0, 0
        )
        _LIBC.syscall(ctypes.c_long(number), thread, wanted, 0)
