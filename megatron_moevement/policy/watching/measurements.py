# SPDX-License-Identifier: Apache-2.0
"""Measurements: how fast slots are copied and sent, and what training waits for."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from megatron_moevement.policy.window.timetable import Timetable

HISTORY = 64
"""Newest pieces of work of a kind that are kept."""
_LEAST_STEPS = 4
"""Between two measurements: one step says little."""
IDLE_SHARE = 0.1
"""Of all cores: where more are idle, nothing takes any from training."""


class Work(NamedTuple):
    """A piece of work that was done.

    Attributes:
        spent_s: by the thread that did it, its waits for the other end included.
    """

    size_bytes: int
    spent_s: float


class MeasuredStep(NamedTuple):
    """A step, from the barrier before it to its own.

    Attributes:
        stall_s: of the duration, what it waited for copies and for the log.
    """

    duration_s: float
    stall_s: float


class CpuTimes(NamedTuple):
    """CPU time until now.

    Attributes:
        beside_s: of the process's threads that work for slots beside training, by their ids.
        process_s: of the whole process.
        idle_s: of all cores that the process may run on, in which nothing ran.
        cores_s: of all these cores.
        clock_s: when it was read.
        waited_s: of the process's threads that may train, for a core, by their ids; None: the
            kernel doesn't count that.
        passes: ids of the threads that passes run on, one after the other.
    """

    beside_s: Mapping[int, float]
    process_s: float
    idle_s: float
    cores_s: float
    clock_s: float = 0.0
    waited_s: Mapping[int, float] | None = None
    passes: Collection[int] = ()

    def contention(self, before: CpuTimes) -> Contention:
        """Returns the shares of an iteration between both."""
        return Contention(self.taken_share(before), self.delayed_share(before))

    def taken_share(self, before: CpuTimes) -> float:
        """Returns the share of an iteration that threads beside training take from it.

        It is 0 where cores are idle, or none is known. Where all are busy, a process gets as much
        of them whatever its threads do: what these threads take, training does without. But no core
        is taken from threads that don't wait for one, as where others give way: an iteration is
        longer at most by all their waits.
        """
        idle_s, cores_s = self.idle_s - before.idle_s, self.cores_s - before.cores_s
        process_s = self.process_s - before.process_s
        if process_s <= 0 or cores_s <= 0 or idle_s > IDLE_SHARE * cores_s:
            return 0.0
        taken_share = min(_all_since(self.beside_s, before.beside_s) / process_s, 1.0)
        waited_share = self._waited_share(before, self.waited_s or {})
        return taken_share if waited_share is None else min(taken_share, waited_share)

    def delayed_share(self, before: CpuTimes) -> float | None:
        """Returns the share of an iteration that passes wait for a core; None: not known."""
        return self._waited_share(before, self.passes)

    def _waited_share(self, before: CpuTimes, threads: Collection[int]) -> float | None:
        """Returns the share of time that some threads wait for a core, by their ids."""
        elapsed_s = self.clock_s - before.clock_s
        if self.waited_s is None or before.waited_s is None or elapsed_s <= 0:
            return None
        waited_s = {each: s for each, s in self.waited_s.items() if each in threads}
        return _all_since(waited_s, before.waited_s) / elapsed_s


class Contention(NamedTuple):
    """What a rank's training shares cores with, as shares of an iteration.

    Attributes:
        taken: that threads beside training take from it at most (`CpuTimes.taken_share`).
        delayed: that passes wait for a core (`CpuTimes.delayed_share`); None: not known.
    """

    taken: float = 0.0
    delayed: float | None = None


NO_CONTENTION = Contention()


def _all_since(now: Mapping[int, float], before: Mapping[int, float]) -> float:
    """Returns what all threads have more; a new one may have the id of one that ended."""
    return sum(value - min(before.get(thread, 0.0), value) for thread, value in now.items())


def achieved_bytes_per_s(history: Sequence[Work]) -> float | None:
    """Returns the bandwidth of pieces of work; None of nothing.

    It is that of the pieces of middle rates: the fastest and the slowest quarter don't count, so
    neither a piece that was held up once nor one that was too small to tell moves it.
    """
    known = [work for work in history if work.size_bytes > 0 and work.spent_s > 0]
    if not known:
        return None
    known.sort(key=lambda work: work.size_bytes / work.spent_s)
    quarter = len(known) // 4
    middle = known[quarter : len(known) - quarter]
    return sum(work.size_bytes for work in middle) / sum(work.spent_s for work in middle)


def are_due(timetable: Timetable, step: int) -> bool:
    """Returns whether ranks tell each other at a step's barrier what they have measured.

    That is at window edges, with four steps at least between them, and where a schedule begins.
    """
    entry = timetable.at(step)
    windows, slot = divmod(step - entry.first_step, entry.window)
    return not slot and not windows % -(-_LEAST_STEPS // entry.window)


class Reduced(NamedTuple):
    """What a rank brings to the barrier, where the greatest of each number counts."""

    to_host: int
    to_holder: int
    iteration: int
    stall: int
    contention: int
    delay: int


_ABSENT = -(2**63)
NOT_MEASURED = Reduced(_ABSENT, _ABSENT, 0, _ABSENT, _ABSENT, _ABSENT)
"""Of a rank that can't tell: then all of them together can't."""
_PER_SECOND = 1_000_000


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one rank has measured since a window edge, or the worst of all ranks.

    Attributes:
        to_host_bytes_per_s: of a slot's copy and its checksums, one after the other; None: no slot
            was captured.
        to_holder_bytes_per_s: to the slowest holder, while the others are sent to; None: there is
            none.
        iteration_s: without stalls.
        stall_s: of an iteration, on average.
        contention_s: of an iteration, that threads beside training take from it (`CpuTimes`).
        delay_s: of an iteration, that passes wait for a core; None: not known.
    """

    to_host_bytes_per_s: float | None
    to_holder_bytes_per_s: float | None
    iteration_s: float
    stall_s: float
    contention_s: float = 0.0
    delay_s: float | None = None

    @classmethod
    def of(
        cls,
        captured: Sequence[Work],
        sent: Iterable[Sequence[Work]],
        steps: Sequence[MeasuredStep],
        contention: Contention = NO_CONTENTION,
    ) -> Measured:
        """Returns what one rank has measured.

        Args:
            captured: slots that were copied to the host and hashed, the newest last; empty ones
                have no bytes and don't count.
            sent: to each holder, the same.
            steps: since the last call, one at least: only as many pieces of work count.
            contention: since the last call.
        """

        def newest(works: Sequence[Work]) -> Sequence[Work]:
            return [work for work in works if work.size_bytes][-min(len(steps), HISTORY) :]

        to_holders = [
            rate for works in sent if (rate := achieved_bytes_per_s(newest(works))) is not None
        ]
        iteration_s = max(statistics.median(step.duration_s - step.stall_s for step in steps), 0.0)
        return cls(
            achieved_bytes_per_s(newest(captured)),
            min(to_holders, default=None),
            iteration_s,
            statistics.fmean(step.stall_s for step in steps),
            contention.taken * iteration_s,
            None if contention.delayed is None else contention.delayed * iteration_s,
        )

    @property
    def vote(self) -> Reduced:
        """The numbers of which the greatest of all ranks tell the worst.

        The shortest iteration is the true one: that of other ranks has a wait for the stalled one.
        """
        return Reduced(
            _ABSENT if (rate := self.to_host_bytes_per_s) is None else -round(rate),
            _ABSENT if (rate := self.to_holder_bytes_per_s) is None else -round(rate),
            -max(round(self.iteration_s * _PER_SECOND), 1),
            round(self.stall_s * _PER_SECOND),
            round(self.contention_s * _PER_SECOND),
            _ABSENT if self.delay_s is None else round(self.delay_s * _PER_SECOND),
        )

    @classmethod
    def worst(cls, greatest: Reduced) -> Measured | None:
        """Returns what the worst rank has measured, by what the barrier found; None of nothing."""
        if not greatest.iteration:
            return None
        return cls(
            None if greatest.to_host == _ABSENT else float(-greatest.to_host),
            None if greatest.to_holder == _ABSENT else float(-greatest.to_holder),
            -greatest.iteration / _PER_SECOND,
            greatest.stall / _PER_SECOND,
            greatest.contention / _PER_SECOND,
            None if greatest.delay == _ABSENT else greatest.delay / _PER_SECOND,
        )
