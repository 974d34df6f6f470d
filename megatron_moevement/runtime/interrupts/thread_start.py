# SPDX-License-Identifier: Apache-2.0
"""Where exceptions that one thread raises in another one must not arrive, and wait.

Until the system runs a new thread, CPython 3.11 counts it by the identifier of the thread that
starts it, and finds it first. An exception for that identifier ends the new thread before its first
instruction, and the other one waits for ever until it has begun.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from megatron_moevement.runtime.rebindings import rebind

P = ParamSpec("P")
T = TypeVar("T")

starting = threading.RLock()
"""Held while a thread starts or calls what `uninterrupted` returned, and while one raises.

Garbage that is collected while a thread starts may start another one, so the lock lets it.
"""
_start = threading.Thread.start
# A child that was forked while another thread held the lock would wait for it for ever.
os.register_at_fork(
    before=starting.acquire,
    after_in_parent=starting.release,
    after_in_child=starting.release,
)


def raise_in_thread(thread: int, exception: type[BaseException]) -> None:
    """Raises an exception in another thread, at its next bytecode; needs `guard_starts`."""
    with starting:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread), ctypes.py_object(exception)
        )


def uninterrupted(function: Callable[P, T]) -> Callable[P, T]:
    """Returns the function; from its first instruction on, nothing is raised in its caller."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        with starting:
            return function(*args, **kwargs)

    return called


def _start_guarded(self: threading.Thread) -> None:
    """Starts a thread and waits until it has begun; stands in for `Thread.start`."""
    with starting:
        _start(self)


def guard_starts() -> None:
    """Holds the lock where a thread starts from now on, in all of this process."""
    rebind("threading:Thread.start", _start_guarded)
