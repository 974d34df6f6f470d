# SPDX-License-Identifier: Apache-2.0
"""Parts of a process's time, and the partition of an interval into them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from enum import Enum, IntEnum
from itertools import pairwise
from typing import NamedTuple


class Part(Enum):
    """What a second of a process was; every second is of one part."""

    USEFUL = "useful"
    """Steps whose work the job has at its end."""

    STALL = "stall"
    """Waits of those steps for what protects them."""

    BETWEEN = "between"
    """From the end of a step to the beginning of the next: reporting, collection of garbage."""

    LOST = "lost"
    """Steps that were trained again later, and the part of a step that a fault cut off."""

    DETECT = "detect"
    """From the fault, where its time is known, else from the newest step, until it is noticed."""

    TEARDOWN = "teardown"
    RENDEZVOUS = "rendezvous"
    BUILD = "build"
    """From the new process groups to the plan; a process that comes in new builds its model."""

    PLAN = "plan"
    FETCH = "fetch"
    REPLAY = "replay"
    REPROTECT = "reprotect"
    """Until each slot of the guarded window has a second holder."""

    WAIT = "wait"
    """For the other ranks, at the end of a recovery."""

    SAVE = "save"
    EVALUATION = "evaluation"
    START_UP = "start-up"
    """Of a launch: imports, rendezvous, model, data, a durable checkpoint."""

    SPARE = "spare"
    """Waiting for a place."""

    ENDING = "ending"
    """From the last step to the end of the process, besides evaluations and saves."""

    GONE = "gone"
    """The process has ended, or is not there yet, and its launch goes on."""

    DOWN = "down"
    """Between two launches."""

    UNEXPLAINED = "unexplained"
    """The process was there, and no event says what it did."""


RECOVERY = (
    *(Part.DETECT, Part.TEARDOWN, Part.RENDEZVOUS, Part.BUILD, Part.PLAN),
    *(Part.FETCH, Part.REPLAY, Part.REPROTECT, Part.WAIT),
)
"""The parts of a recovery, in the order of time."""


class Layer(IntEnum):
    """How closely a claim is known: of several claims on a moment the highest one holds."""

    JOB = 0
    LAUNCH = 1
    LIFE = 2
    PHASE = 3
    """A process says what begins; the end is the beginning of what is next."""

    MEASURED = 4
    """It says what has ended, and how long it took."""

    DETAIL = 5
    """A part of what was measured."""


class Claim(NamedTuple):
    """That a time was of a part; times are microseconds since the epoch."""

    layer: Layer
    start_us: int
    end_us: int
    part: Part


class Span(NamedTuple):
    """A time that is of one part; times are microseconds since the epoch."""

    start_us: int
    end_us: int
    part: Part


def partition(start_us: int, end_us: int, claims: Iterable[Claim]) -> list[Span]:
    """Divides an interval into spans: each moment is in exactly one of them.

    Of the claims on a moment the one of the highest layer holds, among those the one that began
    last, then the shortest. What nobody claims is `Part.UNEXPLAINED`. The order of the claims does
    not matter, nor do their parts that lie outside of the interval. Times are integers, so that
    the lengths of the spans add up to that of the interval exactly.

    Returns:
        Spans that touch each other, in the order of time; neighbours are of different parts.
    """
    clipped = [
        (max(claim.start_us, start_us), min(claim.end_us, end_us), claim)
        for claim in claims
        if max(claim.start_us, start_us) < min(claim.end_us, end_us)
    ]
    clipped.sort(key=lambda one: one[:2])
    edges = sorted({start_us, end_us, *(edge for one in clipped for edge in one[:2])})
    found: list[Span] = []
    holding: list[tuple[int, int, int, str, Part]] = []
    coming = iter(clipped)
    following = next(coming, None)
    for since_us, until_us in pairwise(edges):
        while following is not None and following[0] <= since_us:
            claim = following[2]
            order = (-claim.layer, -claim.start_us, claim.end_us, claim.part.value, claim.part)
            heapq.heappush(holding, order)
            following = next(coming, None)
        while holding and holding[0][2] <= since_us:
            heapq.heappop(holding)
        part = holding[0][-1] if holding else Part.UNEXPLAINED
        if found and found[-1].part is part:
            found[-1] = found[-1]._replace(end_us=until_us)
        else:
            found.append(Span(since_us, until_us, part))
    return found


def totals_us(spans: Iterable[Span]) -> Mapping[Part, int]:
    """Returns how long each part took, in microseconds, in the order of `Part`."""
    sums = dict.fromkeys(Part, 0)
    for span in spans:
        sums[span.part] += span.end_us - span.start_us
    return {part: total for part, total in sums.items() if total}


def within(spans: Iterable[Span], start_us: int, end_us: int) -> list[Span]:
    """Returns the parts of spans that lie in an interval."""
    return [
        Span(max(span.start_us, start_us), min(span.end_us, end_us), span.part)
        for span in spans
        if max(span.start_us, start_us) < min(span.end_us, end_us)
    ]
