# SPDX-License-Identifier: Apache-2.0
"""Timetable: which schedule is in force at which step, and which one captured a window.

A schedule changes at window edges alone, by agreement of all ranks at a commit barrier, and what
was captured under a former one is read by that one. So a version names a schedule for ever: its W,
which operators it has in which slot (`WindowSchedule`), and the step with which its windows begin.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from megatron_moevement.errors import MoEvementError
from megatron_moevement.policy.document import Document
from megatron_moevement.policy.window.schedule import Window, WindowSchedule

MAX_ENTRIES = 8
"""Schedules that a job remembers at a time, as it has to while windows of them are kept."""


class UnknownScheduleError(MoEvementError, ValueError):
    """Nobody knows the schedule of a step or a window: nothing of it could be read."""


class TwoSchedulesError(MoEvementError, RuntimeError):
    """Two schedules have one version: a window would be read by another one than it was written."""


class Trial(NamedTuple):
    """A smaller W that is tried, and what was measured before it.

    Attributes:
        former: W before it.
        slot_bytes: of its largest slot; where some are empty, their mean.
        iteration_s: the median of the newest windows without stalls.
        spread_s: from the shortest to the longest of these.
        delay_s: the median of what passes waited for a core in them; None: not known.
    """

    former: int
    slot_bytes: int
    iteration_s: float
    spread_s: float
    delay_s: float | None = None


class WindowDecision(NamedTuple):
    """A W that was decided for, and what that leaves to those who choose after it.

    The rank that chooses may be lost, and each restart ends what was measured.

    Attributes:
        window: W; schedules before its own may be on the way to it.
        used: the slots that hold anything; None: as many as W has use for.
        patience: windows with slack that a smaller W takes.
        reached: slots in use when it was decided for, or on the way to it.
        trial: that it is; None: it was no change to a smaller W.
    """

    window: int
    used: int | None
    patience: int
    reached: int
    trial: Trial | None = None

    def is_among(self, windows: Container[int]) -> bool:
        """Returns whether a job with other limits may still come to all W that it names."""
        former = () if self.trial is None else (self.trial.former,)
        return all(each in windows for each in (self.window, self.used or self.window, *former))


class TimetableEntry(NamedTuple):
    """A schedule from a step on.

    Attributes:
        schedule_version: how many schedules the job had before it.
        first_step: the step whose state is slot 0 of the first window under it.
        window: W.
        digest: of the schedule itself.
        decision: that led to its W; None: W is given, or the first one, or another schedule
            follows. Journals have room for one.
    """

    schedule_version: int
    first_step: int
    window: int
    digest: str
    decision: WindowDecision | None = None

    def window_of(self, step: int) -> Window:
        """Returns the window that captures S_step under this schedule."""
        start = step - (step - self.first_step) % self.window
        return Window(start, self.window, self.schedule_version)


@dataclasses.dataclass(frozen=True)
class Timetable(Document):
    """The schedules of a history of windows, each in force until the first step of the next.

    Attributes:
        entries: ascending, one at least.
        first_version: of the schedule with which windows last began anew. Windows of older ones are
            of no use: none in force continues them.

    Raises:
        ValueError: versions don't ascend, or one does not begin at an edge of the one before.
    """

    entries: tuple[TimetableEntry, ...]
    first_version: int = 0

    def __post_init__(self) -> None:
        if not self.entries or self.entries[0].schedule_version < self.first_version:
            raise ValueError(f"no timetable from version {self.first_version} on: {self.entries}")
        if any(each.window < 1 for each in self.entries):
            raise ValueError(f"a window needs at least one slot: {self.entries}")
        for former, later in zip(self.entries, self.entries[1:], strict=False):
            steps = later.first_step - former.first_step
            if later.schedule_version <= former.schedule_version or steps < 1:
                raise ValueError(f"{later} does not come after {former}")
            if steps % former.window:
                raise ValueError(f"{later} begins within a window of {former}")

    @classmethod
    def begun(cls, schedule: WindowSchedule, step: int) -> Timetable:
        """Returns the timetable of windows that begin at a step under the first schedule."""
        return cls((TimetableEntry(0, step, schedule.window, schedule.digest),))

    @property
    def newest(self) -> TimetableEntry:
        """The newest schedule that all agreed on; it may not be in force yet."""
        return self.entries[-1]

    @property
    def first_step(self) -> int:
        """The first step of which it is known how it is captured."""
        return self.entries[0].first_step

    def at(self, step: int) -> TimetableEntry:
        """Returns the schedule that S_step is captured under.

        Raises:
            UnknownScheduleError: the step lies before all that is known.
        """
        for entry in reversed(self.entries):
            if entry.first_step <= step:
                return entry
        raise UnknownScheduleError(f"step {step} lies before the first known, {self.first_step}")

    def window_of(self, step: int) -> Window:
        """Returns the window that captures S_step; raises as `at` does."""
        return self.at(step).window_of(step)

    def slot_of(self, step: int) -> int:
        """Returns the slot that captures S_step; raises as `at` does."""
        return step - self.window_of(step).start

    def of(self, window: Window) -> TimetableEntry:
        """Returns the schedule that a window was captured under.

        Raises:
            UnknownScheduleError: none that is known has such a window.
        """
        entry = self.at(window.start)
        if entry.window_of(window.start) != window:
            raise UnknownScheduleError(f"{window} is none of {entry}")
        return entry

    def has(self, window: Window) -> bool:
        """Returns whether a window is one of this timetable."""
        return window.start >= self.first_step and self.window_of(window.start) == window

    def last_before_persisted(self, window: Window) -> int:
        """Returns the last slot's step of the window after one: no replay of this one goes further.

        By the step after it the later window is persisted, or training waits.
        """
        return self.window_of(window.last + 1).last

    def adopted(
        self,
        version: int,
        schedule: WindowSchedule,
        step: int,
        decision: WindowDecision | None = None,
    ) -> Timetable:
        """Returns what holds after all ranks agreed on another schedule at the barrier of a step.

        It is in force from the first window edge after that step on: S_step is captured as before.

        Args:
            decision: that led to its W; None: W is given.

        Raises:
            TwoSchedulesError: its version is not the next.
            ValueError: the schedule agreed on before is not in force yet.
        """
        if version != self.newest.schedule_version + 1:
            raise TwoSchedulesError(
                f"a schedule with version {version} would follow {self.newest.schedule_version}"
            )
        if step < self.newest.first_step:
            raise ValueError(f"{self.newest} is not in force at step {step}")
        edge = self.newest.window_of(step).last + 1
        entry = TimetableEntry(version, edge, schedule.window, schedule.digest, decision)
        former = (each._replace(decision=None) for each in self.entries)
        return dataclasses.replace(self, entries=(*former, entry))

    def restarted(self, step: int) -> Timetable:
        """Returns what holds once windows begin anew at a step, under the newest schedule."""
        version = self.newest.schedule_version + 1
        entry = self.newest._replace(schedule_version=version, first_step=step)
        return Timetable((entry,), version)

    def known_from(self, step: int) -> Timetable:
        """Returns the timetable without schedules that captured nothing from a step on."""
        later = (*self.entries[1:], None)
        kept = tuple(
            entry
            for entry, after in zip(self.entries, later, strict=True)
            if after is None or after.first_step > step
        )
        return self if len(kept) == len(self.entries) else dataclasses.replace(self, entries=kept)

    def digests(self) -> frozenset[str]:
        """Returns the digests of all schedules."""
        return frozenset(entry.digest for entry in self.entries)


def newest_timetable(known: Iterable[Timetable]) -> Timetable | None:
    """Returns what is known together of one history of windows, None of nothing.

    Raises:
        TwoSchedulesError: two of them have another schedule under one version.
    """
    found: dict[int, TimetableEntry] = {}
    newest: Timetable | None = None
    for timetable in dict.fromkeys(known):
        for entry in timetable.entries:
            alone = entry._replace(decision=None)  # which a process has dropped that is ahead
            other = found.setdefault(entry.schedule_version, alone)
            if other != alone:
                raise TwoSchedulesError(
                    f"schedule {entry.schedule_version} is {entry} and {other}: "
                    "windows of it can't be read"
                )
        if newest is None or _extent(newest) < _extent(timetable):
            newest = timetable
    return newest


def _extent(timetable: Timetable) -> tuple[int, int]:
    return timetable.newest.schedule_version, len(timetable.entries)


@dataclasses.dataclass(frozen=True)
class Proposal(Document):
    """A schedule that ranks are to agree on.

    Attributes:
        digest: of the schedule itself.
        decision: that led to its W; None: W is given.
    """

    schedule_version: int
    digest: str
    decision: WindowDecision | None = None


def may_propose(timetable: Timetable, step: int, kept_from: int) -> bool:
    """Returns whether another schedule may be proposed after a step: one change at a time.

    Args:
        kept_from: the oldest step of which any slot may still be there.
    """
    is_in_force = timetable.newest.first_step <= step
    return is_in_force and len(timetable.known_from(kept_from).entries) < MAX_ENTRIES


def due_change(steps: Sequence[int], step: int) -> int | None:
    """Returns which of some changes of the schedule is wanted: the last that is due, None for none.

    Args:
        steps: that must be committed before each.
        step: that is committed.
    """
    return max((place for place, due in enumerate(steps) if due <= step), default=None)


def schedule_vote(timetable: Timetable, proposal: Proposal | None) -> tuple[int, int]:
    """Returns what a rank brings to the barrier, where the greatest of each number counts.

    That is the newest schedule that it knows in whole: the proposed one, or the one agreed on last.
    """
    newest = timetable.newest
    if proposal is not None and proposal.schedule_version > newest.schedule_version:
        version, named = proposal.schedule_version, repr(proposal)
    else:
        version, named = newest.schedule_version, repr(newest)
    digest = hashlib.sha256(named.encode()).digest()[:_DIGEST_BYTES]
    number = version << 8 * _DIGEST_BYTES | int.from_bytes(digest)
    return number, -number


_DIGEST_BYTES = 5
"""Of what a version stands for; the version is in the 23 bits above, without the sign."""


def announced_version(greatest: tuple[int, int]) -> int:
    """Returns the newest version that any rank knows in whole, from what the barrier found."""
    return greatest[0] >> 8 * _DIGEST_BYTES


def agreed_version(greatest: tuple[int, int]) -> int | None:
    """Returns the version that all ranks know in whole; None while one still lacks the newest.

    Args:
        greatest: the greatest of what the ranks brought, number by number.

    Raises:
        TwoSchedulesError: they have different schedules under one version.
    """
    newest, least = greatest[0], -greatest[1]
    version = announced_version(greatest)
    if version != least >> 8 * _DIGEST_BYTES:
        return None
    if newest != least:
        raise TwoSchedulesError(f"ranks have different schedules with the version {version}")
    return version
