# SPDX-License-Identifier: Apache-2.0
"""Failure traces: when a cluster lost how many of its nodes, read from three kinds of text.

Source: the spot-instance samples of github.com/uclasystem/bamboo, `traces/`, and windows of them.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

_HEADER = "t_ms,event,node,alive_after"
_CHANGE = re.compile(r"(?P<t>\d+),(?P<event>add|remove),[^,\s]+(,(?P<alive>\d+))?")
_INIT = re.compile(r"(?P<t>\d+),init,(?P<count>\d+),(?P<alive>\d+)")
_SAMPLE = re.compile(r"(?P<when>\d{4}-\d\d-\d\d, \d\d:\d\d:\d\d), (?P<alive>\d+)")


@dataclasses.dataclass(frozen=True, order=True)
class Failure:
    """Nodes that were lost at one time.

    Attributes:
        at: since the beginning of the trace.
        alive: nodes that there were before.
    """

    at: timedelta
    lost: int
    alive: int


@dataclasses.dataclass(frozen=True)
class _Change:
    """By how much the number of nodes changed, and what it was before."""

    at: timedelta
    nodes: int
    alive: int


def read_trace(text: str) -> tuple[Failure, ...]:
    """Returns the failures of a trace, by time.

    Its first line tells which kind it is:

    - `t_ms,event,node,alive_after`: that header, then rows of `init`, `add` and `remove`;
    - `480000,add,node1`: the same rows without header and count;
    - `2021-12-11, 11:11:30, 55`: samples of the number of running nodes. Stamps may be out of
      order, so each sample is compared with the one that stands before it.

    Raises:
        ValueError: it is none, or nothing fails in it; says in which line.
    """
    lines = [line.strip() for line in text.splitlines()]
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line]
    if not numbered:
        raise ValueError("the file is empty")
    first = numbered[0][1]
    if first == _HEADER:
        changes = list(_rows(numbered[1:]))
    elif _CHANGE.fullmatch(first):
        changes = list(_rows(numbered))
    elif _SAMPLE.fullmatch(first):
        changes = list(_samples(numbered))
    else:
        raise ValueError(
            f"line {numbered[0][0]}: {first!r} begins no trace; a trace begins with {_HEADER}, or "
            "with a row such as 480000,add,node1 or 2021-12-11, 11:11:30, 55"
        )
    failures = _together(sorted(changes, key=lambda change: change.at))
    if not failures:
        raise ValueError("no node fails in it")
    return failures


def _rows(lines: Sequence[tuple[int, str]]) -> Iterator[_Change]:
    alive = 0
    for number, line in lines:
        found = _CHANGE.fullmatch(line)
        if found is None:
            initial = _INIT.fullmatch(line)
            if initial is None:
                raise ValueError(f"line {number}: {line!r} is neither init, add nor remove")
            alive = int(initial["count"])
            continue
        change = 1 if found["event"] == "add" else -1
        if alive + change < 0:
            raise ValueError(f"line {number}: {line!r} takes a node where there is none")
        if found["alive"] is not None and int(found["alive"]) != alive + change:
            raise ValueError(f"line {number}: {line!r}, but {alive + change} nodes are alive")
        yield _Change(timedelta(milliseconds=int(found["t"])), change, alive)
        alive += change


def _samples(lines: Sequence[tuple[int, str]]) -> Iterator[_Change]:
    read = _clock(lines)
    _, before = read(*lines[0])
    for number, line in lines[1:]:
        at, alive = read(number, line)
        if alive != before:
            yield _Change(at, alive - before, before)
        before = alive


def _clock(lines: Sequence[tuple[int, str]]) -> Callable[[int, str], tuple[timedelta, int]]:
    """Returns what reads a sample: time since the earliest one, and the number of nodes."""

    def stamp(number: int, line: str) -> tuple[datetime.datetime, int]:
        found = _SAMPLE.fullmatch(line)
        if found is None:
            raise ValueError(f"line {number}: {line!r} is no sample such as {lines[0][1]!r}")
        try:
            when = datetime.datetime.strptime(found["when"], "%Y-%m-%d, %H:%M:%S")
        except ValueError as error:
            raise ValueError(f"line {number}: {line!r} is at no time") from error
        return when, int(found["alive"])

    start = min(stamp(*line)[0] for line in lines)

    def read(number: int, line: str) -> tuple[timedelta, int]:
        when, alive = stamp(number, line)
        return when - start, alive

    return read


def _together(changes: Sequence[_Change]) -> tuple[Failure, ...]:
    """Returns what was lost at each time; what came in at the same time is left aside."""
    failures: dict[timedelta, Failure] = {}
    for change in changes:
        if change.nodes < 0:
            former = failures.get(change.at)
            lost = -change.nodes + (0 if former is None else former.lost)
            alive = change.alive if former is None else max(former.alive, change.alive)
            failures[change.at] = Failure(change.at, lost, max(alive, lost))
    return tuple(failures.values())
