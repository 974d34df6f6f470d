# SPDX-License-Identifier: Apache-2.0
"""What the processes of a running job have open, read from outside, so that nobody is disturbed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from pathlib import Path

_KIB = 1024
_ZOMBIE = "Z"
_RESET_PEAK = "5"
_HELD_RING = re.compile(r"/held-[^/]+\.ring$")


@dataclasses.dataclass(frozen=True)
class ProcessResources:
    """What one process has open at a moment.

    Attributes:
        threads: of the process.
        descriptors: of all kinds, sockets included.
        sockets: of all families.
        shared_files: files that are mapped to be shared with other processes.
        held_rings: those of them that keep copies of other ranks' slots.
        own_bytes: resident memory that no file backs.
    """

    threads: int
    descriptors: int
    sockets: int
    shared_files: int
    held_rings: int
    own_bytes: int

    @classmethod
    def of(cls, pid: int) -> ProcessResources:
        """Reads them.

        Raises:
            OSError: there is no such process.
        """
        folder = Path(f"/proc/{pid}")
        targets = []
        for descriptor in os.listdir(folder / "fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                targets.append(os.readlink(folder / "fd" / descriptor))
        shared = set()
        for line in (folder / "maps").read_text(encoding="utf-8").splitlines():
            _, permissions, _, _, inode, *name = line.split(maxsplit=5)
            if permissions.endswith("s") and name:
                shared.add((inode, name[0]))
        return cls(
            threads=len(os.listdir(folder / "task")),
            descriptors=len(targets),
            sockets=sum(target.startswith("socket:") for target in targets),
            shared_files=len(shared),
            held_rings=sum(_HELD_RING.search(name) is not None for _, name in shared),
            own_bytes=_status_bytes(pid, "RssAnon"),
        )


def reset_peak(pid: int) -> None:
    """Makes a process's peak memory what it has resident now.

    Raises:
        OSError: there is no such process, or it is another user's.
    """
    Path(f"/proc/{pid}/clear_refs").write_text(_RESET_PEAK, encoding="ascii")


def peak_bytes(pid: int) -> int:
    """Returns the most that a process had resident at once, mapped files included.

    Raises:
        OSError: there is no such process.
    """
    return _status_bytes(pid, "VmHWM")


def disk_bytes(pid: int) -> int:
    """Returns what a process has resident of files on a disk, its libraries above all.

    How much that is, is the system's choice: it maps what it has in its cache.

    Raises:
        OSError: there is no such process, or it is another user's.
    """
    return _status_bytes(pid, "RssFile")


def shared_bytes(pid: int) -> int:
    """Returns what a process has resident of files in memory.

    Raises:
        OSError: there is no such process, or it is another user's.
    """
    return _status_bytes(pid, "RssShmem")


def children_of(parent: int) -> frozenset[int]:
    """Returns the processes that a process has started or taken over as orphans, if they live."""
    threads = Path(f"/proc/{parent}/task").iterdir()
    pids = {int(pid) for thread in threads for pid in (thread / "children").read_text().split()}
    return frozenset(pid for pid in pids if _stat(pid)[0] != _ZOMBIE)


def parent_of(pid: int) -> int:
    """Returns the process that waits for another one's end."""
    return int(_stat(pid)[1])


def _status_bytes(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(value) * _KIB


def _stat(pid: int) -> list[str]:
    """Returns what the kernel says of a process, from its state on."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    return text.rpartition(")")[2].split()
