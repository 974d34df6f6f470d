# SPDX-License-Identifier: Apache-2.0
"""Attendance: whether all of many processes are there, from short lists in a store.

The load of the store grows with the processes, not with their square: each reads a few lists of
bounded length when it comes, and in each look while it waits (`policy/watching/short_lists.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from datetime import timedelta

from megatron_moevement.policy.watching.short_lists import (
    by_list,
    entries_above,
    first_look_s,
    list_of,
    look_interval_s,
    turn,
)


def list_key(name: str, number: int, level: int = 0) -> str:
    """Returns the key of a list; the first one has the bare name."""
    return f"{name}:{level}.{number}" if level or number else name


def left_by(deadline_s: float, longest_s: float = math.inf) -> timedelta:
    """Returns how long to wait at a time; never 0, which torch's stores take for no limit."""
    return timedelta(seconds=max(0.001, min(longest_s, deadline_s - time.monotonic())))


class Attendance:
    """The lists of some processes, as one process or its monitor uses them.

    Attributes:
        lists: the processes of each list of the lowest level.
    """

    def __init__(
        self,
        name: str,
        processes: Iterable[int],
        *,
        add: Callable[[str, int], None],
        read: Callable[[str], Iterable[int]],
    ) -> None:
        """Reads nothing yet.

        Args:
            name: with which the keys of the lists begin.
            processes: all that are wanted.
            add: adds an entry to the list under a key.
            read: returns the entries of one; only those that processes of the job have added.
        """
        self.lists = by_list(processes)
        self._name, self._add, self._read = name, add, read

    def key(self, number: int) -> str:
        """Returns the key of a list of the lowest level."""
        return list_key(self._name, number)

    def note_whole(self, number: int) -> bool:
        """Notes that a list of the lowest level is whole, and those above it that are so with it.

        Returns:
            Whether all are.
        """
        for entry in entries_above(number, self.lists):
            key = list_key(self._name, entry.place, entry.level)
            noted = set(self._read(key))
            if entry.number not in noted:
                self._add(key, entry.number)
                noted = set(self._read(key))  # whoever comes last sees all
            if not noted >= entry.wanted:
                return False
        return True


class Looks:
    """When a process that waits looks, and at which lists."""

    def __init__(
        self,
        process: int,
        lists: Iterable[int],
        interval_s: float,
        *,
        processes: int,
        free: int,
        longest_s: float = math.inf,
    ) -> None:
        """Lets it look at once.

        Args:
            lists: of the lowest level, all of them.
            interval_s: of looks, where there are few processes.
            processes: how many wait.
            free: so many may look as often as that.
            longest_s: that the interval is at most, however few they are.
        """
        self._process, self._lists = process, sorted(lists)
        self.interval_s = min(look_interval_s(interval_s, processes, free=free), longest_s)
        self._looks = 0
        self._next_s = -math.inf

    def due(self) -> tuple[int, ...]:
        """Returns the lists to look at now: its own and another one; none before it is time."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return ()
        again_s = self.interval_s
        if self._looks == 0 and len(self._lists) > 1:
            again_s = first_look_s(self.interval_s, self._process)
        self._next_s = now_s + again_s
        other = self._lists[turn(self._process, self._looks, len(self._lists))]
        self._looks += 1
        own = {list_of(self._process)}.intersection(self._lists)
        return tuple(sorted({*own, other}))

    def left_s(self) -> float:
        """Returns how long it is until the next look."""
        return max(0.0, self._next_s - time.monotonic())
