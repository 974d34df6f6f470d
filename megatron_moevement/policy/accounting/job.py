# SPDX-License-Identifier: Apache-2.0
"""A job as its processes lived it: launches, who was which process, faults and outages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from megatron_moevement.policy.accounting.life import End, GenerationOfLife, Life

KEPT_CODE = 75
"""Of a process that stopped because others were lost, with its state kept."""
_BY_USERS = frozenset({0, 130})
"""Of processes that have finished, and of those that Ctrl-C ended."""


@dataclasses.dataclass(frozen=True)
class Outage:
    """A time in which no step was trained because of faults; microseconds since the epoch.

    Attributes:
        launch: index of the launch that went on after it.
        generation: that went on after it.
        faults: that it is made of: restarts in place and relaunches.
        start_us: the end of the newest step before.
        end_us: when all ranks were ready to train; None where they never were.
    """

    launch: int
    generation: int
    faults: int
    start_us: int
    end_us: int | None


@dataclasses.dataclass(frozen=True)
class KeptSteps:
    """How far a job came in a generation.

    Attributes:
        ended_us: end of the newest step that a process recorded; microseconds since the epoch.
        unrecorded: steps after it that the job has, and all who trained them died before they
            recorded them.
    """

    ended_us: int
    unrecorded: int


@dataclasses.dataclass(frozen=True)
class Launch:
    """The processes that were started together.

    Attributes:
        lives: by number of the process.
    """

    lives: Mapping[int, Life]

    @property
    def begun_us(self) -> int:
        """Start of the first process."""
        return min(life.begun_us for life in self.lives.values())

    @property
    def until_us(self) -> int:
        """End of the last process."""
        return max(life.until_us for life in self.lives.values())

    @property
    def generations(self) -> Sequence[int]:
        """Numbers of those that any process was in; the first one where none came so far."""
        found = {number for life in self.lives.values() for number in life.generations}
        return sorted(found) or [0]

    def of_generation(self, number: int) -> list[GenerationOfLife]:
        """Returns a generation as each process went through it."""
        return [
            life.generations[number] for life in self.lives.values() if number in life.generations
        ]

    def first_step(self, number: int) -> int | None:
        """Returns the first step that any process trained in a generation."""
        steps = [one.first_step for one in self.of_generation(number) if one.first_step is not None]
        return min(steps, default=None)

    def last_step(self, number: int) -> int | None:
        """Returns the newest step that any process trained in a generation."""
        steps = [one.last_step for one in self.of_generation(number) if one.last_step is not None]
        return max(steps, default=None)

    @property
    def ended_well(self) -> bool:
        """Whether a process says that training has come to an end."""
        return any(life.code == 0 for life in self.lives.values())

    @property
    def was_lost(self) -> bool:
        """Whether all processes have ended because they, or others, were lost."""
        codes = [life.code for life in self.lives.values() if life.code is not None]
        if len(codes) < len(self.lives) or not _BY_USERS.isdisjoint(codes):
            return False
        return any(code == KEPT_CODE or code < 0 for code in codes)

    @property
    def stepped_us(self) -> int:
        """The end of the newest step; the start where there is none."""
        steps = [life.stepped_us for life in self.lives.values() if life.stepped_us is not None]
        return max(steps, default=self.begun_us)

    def kept_steps(self, number: int, lost_from: int | None) -> KeptSteps | None:
        """Returns how far the job came in a generation, of what it has at its end.

        Args:
            number: of the generation.
            lost_from: the first step that was trained again later; None for none.
        """
        ends = [
            (one.last_step, one.stepped_us)
            for one in self.of_generation(number)
            if one.last_step is not None and one.stepped_us is not None
        ]
        kept = [end for end in ends if lost_from is None or end[0] < lost_from]
        if not kept:
            return None
        last, ended_us = max(kept)
        # Steps follow each other: who trained the next one had all before it.
        has_gap = lost_from is not None and len(kept) == len(ends)
        return KeptSteps(ended_us, lost_from - 1 - last if has_gap and lost_from else 0)

    def deaths_us(self) -> list[int]:
        """Returns when processes ended that did not end well, by time."""
        lives = self.lives.values()
        return sorted(life.ended_us for life in lives if life.ended_us is not None and life.code)


@dataclasses.dataclass(frozen=True)
class Job:
    """All launches of a job, in the order of time."""

    launches: Sequence[Launch]

    @property
    def begun_us(self) -> int:
        """Start of the first launch."""
        return self.launches[0].begun_us

    @property
    def until_us(self) -> int:
        """End of the last launch."""
        return max(launch.until_us for launch in self.launches)

    @property
    def processes(self) -> Sequence[int]:
        """Numbers of the processes of any launch."""
        return sorted({number for launch in self.launches for number in launch.lives})

    def lost_from(self) -> Mapping[tuple[int, int], int | None]:
        """Returns by launch and generation the first step that was trained again later."""
        found: dict[tuple[int, int], int | None] = {}
        again: int | None = None
        for index, launch in reversed(list(enumerate(self.launches))):
            for number in reversed(launch.generations):
                found[index, number] = again
                first = launch.first_step(number)
                if first is not None:
                    again = first if again is None else min(first, again)
        return found

    def steps(self) -> int:
        """Returns how many steps the job has at its end, of those that these launches trained.

        Steps follow each other: one that lies between two others was committed, though a fault came
        before anybody reported it.
        """
        lost_from = self.lost_from()
        kept: set[int] = set()
        for index, launch in enumerate(self.launches):
            for number in launch.generations:
                first, last = launch.first_step(number), launch.last_step(number)
                if first is None or last is None:
                    continue
                lost = lost_from[index, number]
                kept.update(range(first, last + 1 if lost is None else min(lost, last + 1)))
        return max(kept) - min(kept) + 1 if kept else 0

    def outages(self) -> list[Outage]:
        """Returns the outages in the order of time.

        Faults that strike before training goes on after others are of one outage.
        """
        found: list[Outage] = []
        stopped_us: int | None = None
        faults = 0
        for index, launch in enumerate(self.launches):
            for number in launch.generations:
                known = launch.of_generation(number)
                if number or (index and not self.launches[index - 1].ended_well):
                    faults += 1
                    stops = [one.stopped_us or one.noticed_us for one in known]
                    began = [at for at in stops if at is not None]
                    if stopped_us is None:
                        stopped_us = max(began) if began else launch.begun_us
                trains = [one.trains_us for one in known if one.trains_us is not None]
                if trains and faults:
                    assert stopped_us is not None
                    found.append(Outage(index, number, faults, stopped_us, max(trains)))
                    stopped_us, faults = None, 0
            if index + 1 < len(self.launches) and stopped_us is None and not launch.ended_well:
                stopped_us = launch.stepped_us
        if faults and stopped_us is not None:
            last = self.launches[-1]
            number = last.generations[-1]
            found.append(Outage(len(self.launches) - 1, number, faults, stopped_us, None))
        return found


def job_of(lives: Iterable[Life], ends: Iterable[End] = ()) -> Job:
    """Returns the job that processes were of.

    Those that name no launch, of an older build, are of one if there is no time between them in
    which none of them was there.

    Args:
        lives: of all processes of all launches.
        ends: that their launchers recorded.
    """
    known = {(end.launch, end.process): end for end in ends}
    lives = [
        life if end is None else end.after(life)
        for life in lives
        for end in [known.pop((life.launch or "", life.process or 0), None)]
    ]
    lives += [end.after(None) for end in known.values()]
    named: dict[str, list[Life]] = {}
    unnamed: list[Life] = []
    for life in lives:
        if life.launch is None:
            unnamed.append(life)
        else:
            named.setdefault(life.launch, []).append(life)
    together = [*named.values(), *_clusters(unnamed)]
    together.sort(key=lambda members: min(life.begun_us for life in members))
    return Job([Launch(_numbered(members)) for members in together])


def _clusters(lives: Iterable[Life]) -> list[list[Life]]:
    found: list[list[Life]] = []
    until_us = 0
    for life in sorted(lives, key=lambda one: one.begun_us):
        if found and life.begun_us <= until_us:
            found[-1].append(life)
        else:
            found.append([life])
        until_us = max(until_us, life.until_us)
    return found


def _numbered(lives: Sequence[Life]) -> dict[int, Life]:
    """Returns lives by the number of the process; who names none has its first rank, if free."""
    found: dict[int, Life] = {}
    for life in sorted(lives, key=lambda one: (one.process is None, one.begun_us, one.name)):
        number = life.process
        if number is None and life.ranks:
            number = life.ranks[0]
        if number is None or number in found:
            number = max(found, default=-1) + 1
        found[number] = life
    return dict(sorted(found.items()))
