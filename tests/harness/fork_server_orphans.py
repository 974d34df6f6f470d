# SPDX-License-Identifier: Apache-2.0
"""Processes that outlive the ranks that have started them, and where they listen."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection
from pathlib import Path

_POLL_S = 0.02
_LISTENS = "0A"
"""As /proc/net/tcp writes the state of a socket."""
_STATE, _INODE = 3, 9
_ADDRESS = 1
_STATUS = re.compile(r"^State:\t(.*)$", re.MULTILINE)


def await_orphans(others: Collection[int], patience_s: float) -> list[str]:
    """Waits until the children of the calling process have ended, and reaps them.

    It is the subreaper of what its children start, so that includes what those leave behind.

    Args:
        others: children that are none of the matter.
        patience_s: how long to wait; 0: not at all, nothing is looked at.

    Returns:
        The processes that are still there, with the ports at which they listen.
    """
    deadline = time.monotonic() + patience_s
    while patience_s:
        left = [pid for pid in children() if pid not in others and not _has_ended(pid)]
        if not left:
            break
        if time.monotonic() >= deadline:
            return [_describe(pid) for pid in left]
        time.sleep(_POLL_S)
    return []


def children() -> list[int]:
    """Returns the children of the calling process, which has one thread."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def _has_ended(pid: int) -> bool:
    reaped, _ = os.waitpid(pid, os.WNOHANG)
    return reaped == pid


def _describe(pid: int) -> str:
    folder = Path(f"/proc/{pid}")
    name = (folder / "comm").read_text(encoding="utf-8").strip()
    open_files = set()
    for descriptor in os.listdir(folder / "fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            open_files.add(os.readlink(folder / "fd" / descriptor))
    ports = [port for port, inode in _listening(folder) if f"socket:[{inode}]" in open_files]
    listens = f", listens at {', '.join(map(str, sorted(ports)))}" if ports else ""
    return f"{name} {pid} ({_waits(folder)}){listens}"


def _waits(folder: Path) -> str:
    """Returns the state of a process, and where in the kernel its threads wait."""
    state = _STATUS.search((folder / "status").read_text(encoding="utf-8"))
    places = []
    for task in sorted((folder / "task").iterdir()):
        with contextlib.suppress(OSError):  # ended meanwhile, or not permitted
            places.append((task / "wchan").read_text(encoding="ascii"))
    return f"{state[1] if state else 'ended'} in {', '.join(places)}"


def _listening(folder: Path) -> list[tuple[int, str]]:
    """Returns ports and inodes of the sockets that listen in a process's network."""
    found = []
    for table in ("tcp", "tcp6"):
        for line in (folder / "net" / table).read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[_STATE] == _LISTENS:
                found.append((int(fields[_ADDRESS].rpartition(":")[2], 16), fields[_INODE]))
    return found
