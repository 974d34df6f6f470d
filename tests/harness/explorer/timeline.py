# SPDX-License-Identifier: Apache-2.0
"""The timeline of a scenario: deaths, commits, persisted windows and recoveries, as they came."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from functools import cached_property

from megatron_moevement.policy.facts.facts import Facts, InconsistentFactsError
from megatron_moevement.policy.faults.fault_schedule import FaultKind
from megatron_moevement.policy.recovery.plan import Plan, Verdict, WindowEdges
from megatron_moevement.policy.recovery.recovery_planner import plan_start
from megatron_moevement.runtime.observation.events import EventName, EventRecord
from tests.harness.explorer.job import Protection
from tests.harness.explorer.outcome import LaunchOutcome, Outcome

_FROM_TIER = re.compile(r"goes on from the tier of step (\d+) in ")


@dataclasses.dataclass(frozen=True)
class Death:
    """The end of a process before its time.

    Attributes:
        launch: its launch.
        process: its number in the launch.
        time: seconds since the epoch.
        forgot: whether its memory was removed.
    """

    launch: int
    process: int
    time: float
    forgot: bool


@dataclasses.dataclass(frozen=True)
class Recovery:
    """One recovery, as its processes wrote down what it was made of.

    Attributes:
        launch: that it belongs to.
        time: seconds since the epoch, of its facts.
        facts: of all its processes.
        plan: that the policy makes of them; None where nothing in memory counts.
        broken: why the policy makes none.
        newest: the newest step that any process had reported.
        until: seconds since the epoch, of the next recovery.
        said: how many steps its plan says to be lost, or one that was cut before it; None: the plan
            says that nobody knows how many.
    """

    launch: int
    time: float
    facts: Facts
    plan: Plan | None
    broken: str
    newest: int
    until: float
    said: int | None = 0

    @property
    def target(self) -> int:
        """The step that it leads to."""
        return (self.facts.durable or 0) if self.plan is None else self.plan.target

    @property
    def name(self) -> str:
        """Where it is to be found."""
        return f"launch {self.launch}, generation {self.facts.generation}"


@dataclasses.dataclass(frozen=True)
class PersistedWindow:
    """A window that a job said to be persisted.

    Attributes:
        start: its first step.
        captured: seconds since the epoch, of its last slot.
        copies: that each of its slots had then, those that spares keep included.
    """

    start: int
    captured: float
    copies: int


class Timeline:
    """What happened in all launches of a scenario."""

    def __init__(self, outcome: Outcome, protection: Protection) -> None:
        """Reads what the launches left.

        Args:
            outcome: of the scenario.
            protection: of its job.
        """
        self._protection = protection
        self.launches: Sequence[LaunchOutcome] = outcome.launches
        self.events: list[list[EventRecord]] = [launch.events() for launch in outcome.launches]

    @cached_property
    def deaths(self) -> list[Death]:
        """Processes that were killed or ended on purpose, by time."""
        found = []
        for number, launch in enumerate(self.launches):
            found += [Death(number, one.process, one.time, one.forgot) for one in launch.killed]
            ended = self._ended_on_purpose(number)
            found += [
                Death(number, launch.pids.index(event.pid), event.time, forgot=False)
                for event in ended
            ]
            found += self._unrecorded(number, launch, {event.pid for event in ended})
        return sorted(found, key=lambda death: death.time)

    def _ended_on_purpose(self, launch: int) -> list[EventRecord]:
        """Returns the faults of a launch that ended their process."""
        return [
            event
            for event in self.of(launch, EventName.FAULT_INJECTED)
            if event.fields["kind"] != FaultKind.EXCEPTION.value
        ]

    def _unrecorded(self, number: int, launch: LaunchOutcome, known: set[int]) -> Iterator[Death]:
        """Yields deaths of processes that had no events yet: before the next recovery."""
        for process, fault in launch.struck():
            pid = launch.pids[process]
            if pid in known or fault.kind is FaultKind.EXCEPTION:
                continue
            later = [time for time, facts in launch.facts() if facts.generation > fault.generation]
            yield Death(number, process, min(later, default=float("inf")) - 1e-3, forgot=False)

    @cached_property
    def recoveries(self) -> list[Recovery]:
        """All recoveries, by time; the beginning of the job is one of nothing."""
        gathered = [
            (time, number, facts)
            for number, launch in enumerate(self.launches)
            for time, facts in launch.facts()
        ]
        gathered.sort(key=lambda each: each[0])
        found: list[Recovery] = []
        newest, since, said = 0, 0.0, 0
        for index, (time, launch, facts) in enumerate(gathered):
            until = gathered[index + 1][0] if index + 1 < len(gathered) else float("inf")
            newest = max([newest, *self._steps(since, time)])
            plan, broken = _planned(facts)
            rolls_back = plan is not None and plan.verdict is Verdict.ROLLBACK
            lost = plan.lost_steps if rolls_back and plan is not None else 0
            recovery = Recovery(
                launch,
                time,
                facts,
                plan,
                broken,
                newest,
                until,
                None if lost is None else max(said, lost),
            )
            found.append(recovery)
            since = time
            if self.has_come_back(recovery):
                newest, said = recovery.target, 0
            else:
                said = max(said, lost or 0)
        return found

    @cached_property
    def from_tiers(self) -> list[tuple[int, int]]:
        """The launches that went on from tiers, and their steps, as they were reported."""
        return [
            (number, int(step))
            for number, launch in enumerate(self.launches)
            for process in range(len(launch.pids))
            for step in _FROM_TIER.findall(launch.output(process))
        ]

    def newest_tier(self, recovery: Recovery) -> int | None:
        """Returns the step of the newest tier that was whole before the generation of a recovery.

        Those of a history that was given up for what is durable do not count.
        """
        given_up = [
            one.time
            for one in self.recoveries
            if one.time < recovery.time
            and (
                one.plan is None or one.plan.verdict is Verdict.ROLLBACK or one.plan.is_from_durable
            )
        ]
        began, place = max(given_up, default=0.0), (recovery.launch, recovery.facts.generation)
        return max(
            (
                event.iteration
                for number in range(recovery.launch + 1)
                for event in self.of(number, EventName.TIER_WRITTEN)
                if event.time > began and (number, event.generation) < place
            ),
            default=None,
        )

    def has_come_back(self, recovery: Recovery) -> bool:
        """Returns whether a recovery was carried out before the next one began, on any rank."""
        return any(
            recovery.time <= event.time < recovery.until
            for name in (EventName.RECOVERED, EventName.ITERATION)
            for event in self.of(recovery.launch, name, recovery.facts.generation)
        )

    def of(self, launch: int, name: EventName, generation: int | None = None) -> list[EventRecord]:
        """Returns the events of a name, of a generation of a launch or of all of them."""
        return [
            event
            for event in self.events[launch]
            if event.event is name and generation in {None, event.generation}
        ]

    def restarts(self, launch: int) -> int:
        """Returns how often a launch was restarted in place."""
        return max((event.generation for event in self.events[launch]), default=0)

    def persisted_before(self, time: float) -> PersistedWindow | None:
        """Returns the newest window that was persisted before.

        What was persisted before windows began anew is gone.
        """
        began = self._began_anew(time)
        windows = [
            event for event in self._all(EventName.WINDOW_PERSISTED) if began <= event.time < time
        ]
        if not windows:
            return None
        newest = max(windows, key=lambda event: event.time)
        start, last = newest.fields["start"], newest.fields["start"] + newest.fields["size"] - 1
        reached = [
            event.time
            for event in self._all(EventName.ITERATION)
            if event.iteration <= last and event.time <= newest.time
        ]
        captured = min(max(reached, default=0.0), newest.time)
        return PersistedWindow(start, captured, newest.fields["copies"])

    def _began_anew(self, time: float) -> float:
        """Returns when windows began anew for the last time before."""
        anew = [
            one.time
            for one in self.recoveries
            if one.time < time and (one.plan is None or one.plan.edges is WindowEdges.RESTARTED)
        ]
        return max(anew, default=0.0)

    def memories_lost(self, recovery: Recovery, since: float) -> int:
        """Returns in how many failure domains memory was lost before a recovery, since a time.

        What a process left in memory is there for who takes its place, unless it was removed, or
        the job does without adoption and went on in place. Without adoption a launch that is
        restarted before it has looked takes over nothing at all; one that is restarted later,
        before it has persisted a window, has nothing of what former spares left.
        """
        if not self._protection.adopts and self._has_looked_late(recovery):
            return len(self.launches[recovery.launch].pids)
        lost = set()
        for death in self.deaths:
            if not since <= death.time < recovery.time:
                continue
            in_place = any(
                one.launch == death.launch and death.time < one.time <= recovery.time
                for one in self.recoveries
            )
            if death.forgot or (in_place and not self._protection.adopts):
                lost.add((death.launch, death.process // self._protection.domain))
        return len(lost) + (0 if self._protection.adopts else self._left_by_spares(recovery, since))

    def _has_looked_late(self, recovery: Recovery) -> bool:
        """Returns whether a relaunch had been restarted before its processes looked for memory."""
        if not recovery.launch:
            return False
        generations = [
            one.facts.generation for one in self.recoveries if one.launch == recovery.launch
        ]
        return recovery.facts.generation == min(generations) > 0

    def _left_by_spares(self, recovery: Recovery, since: float) -> int:
        """Returns how many stores of a former launch's spares a restarted relaunch may lack.

        Its first generation takes over what ranks left, and the rest where that isn't enough.
        """
        launch = recovery.launch
        began = min(one.time for one in self.recoveries if one.launch == launch)
        if not launch or not recovery.facts.generation or began < since:
            return 0
        return len(self.launches[launch - 1].pids) - len(recovery.facts.layout.ranks)

    def _all(self, name: EventName) -> Iterator[EventRecord]:
        for events in self.events:
            yield from (event for event in events if event.event is name)

    def _steps(self, since: float, until: float) -> Iterator[int]:
        for event in self._all(EventName.ITERATION):
            if since <= event.time < until:
                yield event.iteration


def _planned(facts: Facts) -> tuple[Plan | None, str]:
    try:
        return plan_start(facts), ""
    except InconsistentFactsError as error:
        return None, str(error)
