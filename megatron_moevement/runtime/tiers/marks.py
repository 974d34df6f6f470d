# SPDX-License-Identifier: Apache-2.0
"""Marks of ranks in a target: by them one rank sees whether it is where the others write, too."""

from __future__ import annotations

import time
from collections.abc import Collection

from megatron_moevement.runtime.tiers.target import Target

_PREFIX = "marks-"

_BETWEEN_LOOKS_S = 0.25


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
