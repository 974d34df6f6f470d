# SPDX-License-Identifier: Apache-2.0
"""What processes of a job leave behind, and how the launcher ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kills what is left of a rank: itself after an error, and processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def kill_what_is_left(others: frozenset[int]) -> None:
    """Kills and reaps what ranks started in sessions of its own: with them, its work is over.

    Args:
        others: children that are not the job's.
    """
    while left := children() - others:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def children() -> frozenset[int]:
    """Returns the children of this process, those of all its threads."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found.update(map(int, (task / "children").read_text().split()))
    return frozenset(found)
