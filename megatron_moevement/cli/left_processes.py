# SPDX-License-Identifier: Apache-2.0
"""What processes of a job leave behind, and how the launcher ends it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


@contextlib.contextmanager
def started_ranks() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Yields a list for the ranks of a job, leaders of their sessions; ends them after the block.

    What is left of a rank is killed: itself after an error, processes that it started, and those
    that it started in sessions of their own, such as the monitors of in-process restart. The
    latter come to this process when their rank ends; after the block, this process is again no
    more of a reaper than before.
    """
    others = _children()
    libc = ctypes.CDLL(None)
    before = ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        yield ranks
    finally:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()
        _kill_children_except(others)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value)


def _kill_children_except(others: frozenset[int]) -> None:
    while left := _children() - others:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> frozenset[int]:
    """Returns the children of this process, those of all its threads."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found.update(map(int, (task / "children").read_text().split()))
    return frozenset(found)
