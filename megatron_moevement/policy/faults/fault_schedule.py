# SPDX-License-Identifier: Apache-2.0
"""Fault schedules: which rank is struck when, drawn from a seed.

Times, ranks and kinds come from streams of their own: another MTBF strikes the same ranks in the
same order, and nothing depends on how long anything takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from datetime import timedelta
from enum import Enum
from random import Random

from megatron_moevement.policy.faults.failure_trace import Failure


class FaultKind(Enum):
    """What happens to a process."""

    KILL = "kill"
    """SIGKILL: nothing is flushed, no handler runs."""
    STOP = "stop"
    """SIGSTOP: it hangs, with all its connections open."""
    EXCEPTION = "exception"
    """A Python exception."""
    EXIT = "exit"
    """`sys.exit(1)`."""
    SEGFAULT = "segfault"
    """It reads from an address that there is not."""


@dataclasses.dataclass(frozen=True)
class TimedFault:
    """A fault at a time.

    Attributes:
        at: since the job began.
    """

    at: timedelta
    rank: int
    kind: FaultKind


def poisson_faults(
    mtbf: timedelta, world_size: int, kinds: Sequence[FaultKind], seed: int
) -> Iterator[TimedFault]:
    """Yields the faults of a job without end: a Poisson process, every rank equally likely.

    Args:
        mtbf: mean time between two faults of the whole job.
        kinds: which of them are drawn, equally likely.
    """
    gaps, victims = _stream(seed, "gaps"), _Victims(world_size, kinds, seed)
    at = timedelta()
    while True:
        at += mtbf * gaps.expovariate(1.0)
        yield from victims.draw(at, 1)


def trace_faults(
    failures: Sequence[Failure],
    world_size: int,
    kinds: Sequence[FaultKind],
    seed: int,
    speed: float = 1.0,
) -> Iterator[TimedFault]:
    """Yields the faults of a job that meets with what a cluster met with.

    A job keeps its size, while the nodes of a trace come and go. So each failure takes as large a
    part of the ranks as it took of the nodes, at least one rank; which ones is drawn.

    Args:
        failures: by time.
        kinds: which of them are drawn, equally likely.
        speed: how many times faster than it happened the trace passes.
    """
    victims = _Victims(world_size, kinds, seed)
    for failure in failures:
        share = world_size * failure.lost / failure.alive
        yield from victims.draw(failure.at / speed, max(1, round(share)))


class _Victims:
    def __init__(self, world_size: int, kinds: Sequence[FaultKind], seed: int) -> None:
        self._world_size = world_size
        self._kinds = tuple(kinds)
        self._ranks, self._draws = _stream(seed, "ranks"), _stream(seed, "kinds")

    def draw(self, at: timedelta, count: int) -> Iterator[TimedFault]:
        """Yields the faults of one time: as many different ranks."""
        for rank in sorted(self._ranks.sample(range(self._world_size), count)):
            yield TimedFault(at, rank, self._draws.choice(self._kinds))


def _stream(seed: int, name: str) -> Random:
    return Random(f"{name} {seed}")  # noqa: S311  (reproducible, not secret)
