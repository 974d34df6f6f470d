# SPDX-License-Identifier: Apache-2.0
"""How much memory this process may still take: of the machine, and of its control groups."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def available_memory_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Returns how much memory the kernel can still give to this process.

    A batch system or a container may allow less than the machine has, and files in shared memory
    count: who takes more is killed.
    """
    lines = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    available_bytes = int(lines["MemAvailable"].removesuffix("kB")) * 1024
    return min([available_bytes, *_left_in_groups(proc / "self" / "cgroup", cgroups)])


def _left_in_groups(memberships: Path, cgroups: Path) -> list[int]:
    """Returns what each group with a limit, and those above it, have left."""
    left = []
    for line in memberships.read_text().splitlines() if memberships.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            root, names = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            root = cgroups / "memory"
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        left += [_left_bytes(root / one, *names) for one in (group, *group.parents)]
    return [one for one in left if one is not None]


def _left_bytes(group: Path, limit: str, used: str, reclaimed: str) -> int | None:
    """Returns what a group has left, None where it has no limit or can't be read."""
    try:
        limit_bytes = int((group / limit).read_text())
        used_bytes = int((group / used).read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # "max" is no number
        return None
    return max(0, limit_bytes - used_bytes + int(counts.get(reclaimed, 0)))
