# SPDX-License-Identifier: Apache-2.0
"""Short lists: how many processes find out that all are there without each reading of all.

Each list has a bounded number of entries. Processes are on the lists of the lowest level by their
numbers. A list that is whole is an entry of one on the level above, up to the only list of the top.
Who adds the last entry of a list sees that it is whole, and goes on above. So all are found to be
there by reading a few short lists, however many processes there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

ENTRIES = 32
"""Of a list, at most."""
_SLICES_PER_S = 4096
"""Waits that all processes begin together in a second, at most, where there are many."""


class Entry(NamedTuple):
    """What notes that a list is whole.

    Attributes:
        level: of the list that it is in; 0 is that of the processes.
        place: of that list on its level.
        number: of the list that is whole, on the level below.
        wanted: the entries with which that list is whole itself.
    """

    level: int
    place: int
    number: int
    wanted: frozenset[int]


def list_of(process: int) -> int:
    """Returns which list of the lowest level a process is on."""
    return process // ENTRIES


def by_list(processes: Iterable[int]) -> dict[int, frozenset[int]]:
    """Returns the processes of each list of the lowest level that has any."""
    found: dict[int, set[int]] = {}
    for process in processes:
        found.setdefault(list_of(process), set()).add(process)
    return {number: frozenset(found[number]) for number in sorted(found)}


def entries_above(number: int, lists: Iterable[int]) -> tuple[Entry, ...]:
    """Returns what a list of the lowest level is noted by once it is whole, and those above it.

    Args:
        lists: of the lowest level, all of them.

    Returns:
        The entries in their order; none where there is one list only.
    """
    level, below, found = 1, frozenset(lists), []
    while len(below) > 1:
        place = number // ENTRIES
        wanted = frozenset(one for one in below if one // ENTRIES == place)
        found.append(Entry(level, place, number, wanted))
        level, number, below = level + 1, place, frozenset(one // ENTRIES for one in below)
    return tuple(found)


def look_interval_s(shortest_s: float, processes: int, *, free: int) -> float:
    """Returns how long a process waits between two looks.

    Args:
        shortest_s: where there are few processes.
        free: so many may look as often as that; more share the looks that these would take.
    """
    return shortest_s * max(1.0, processes / free)


def first_look_s(interval_s: float, process: int) -> float:
    """Returns when a process looks again for the first time, so that those of a list take turns."""
    return interval_s * (process % ENTRIES + 1) / ENTRIES


def slice_s(shortest_s: float, processes: int) -> float:
    """Returns how long a process waits at a time, which delays Ctrl-C.

    Args:
        shortest_s: where there are few processes.
    """
    return max(shortest_s, processes / _SLICES_PER_S)


def turn(process: int, looks: int, lists: int) -> int:
    """Returns the place among all lists of the one that a process looks after beside its own.

    Those whose processes are all gone are looked after so: in each round of looks each list has as
    many processes that look at it as any other, one of each place in a list, so they take turns.

    Args:
        looks: of this process before this one.
        lists: how many there are.
    """
    return (list_of(process) + process % ENTRIES + looks) % lists
