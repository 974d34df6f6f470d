# SPDX-License-Identifier: Apache-2.0
"""What a run leaves, written by hand: for judges to be judged by."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron_moevement.policy.facts.facts import Condition, Facts, LiveState
from megatron_moevement.policy.facts.facts_document import FACTS, dump_facts
from megatron_moevement.policy.job.ranks import Layout as RankLayout
from megatron_moevement.policy.recovery.recovery_planner import plan_recovery
from megatron_moevement.runtime.observation.events import EventLog, EventName
from megatron_moevement.settings.faults import Fault
from tests.harness.explorer.history import History, Launch
from tests.harness.explorer.job import DrawnJob, Layout, Protection
from tests.harness.explorer.outcome import Killed, LaunchOutcome, Outcome
from tests.harness.explorer.scenario import Scenario
from tests.harness.job_facts import Job, without_processes

JOB = Job(RankLayout(pp=4), step=13)
LOST = 1
DIGEST: dict[str, Any] = {"iteration": 20, "operators": {"one": "a"}, "losses": {"1": "b"}}
SCENARIO = Scenario(
    None,
    DrawnJob(layout=Layout(pp=4), protection=Protection(window=3, replicas=2, adopts=False)),
    History((Launch(spares=1),)),
)


class Run:
    """Writes what a run left in which one process was killed, and its stage replayed."""

    def __init__(self, folder: Path) -> None:
        """Takes an empty folder; what is written can be changed before `outcome`."""
        self.folder = folder
        self.of_generation(1)
        self.codes = [0, -9, 0, 0, 0]
        self.digest: dict[str, Any] | None = DIGEST
        self.left: tuple[str, ...] = ()
        self.orphans: tuple[str, ...] = ()
        self.killed_at = 90.0
        self.before: Facts | None = None
        self.said: dict[int, str] = {}
        self.faults: tuple[Fault, ...] = ()
        self.timed_out = False
        self.replayed = list(range(self.plan.start(LOST) + 1, self.plan.target + 1))
        self.verified = True
        self.passes = 0
        self.clock = 0.0
        self.newest = 13
        self.copies = 2
        self.tier = 0

    def of_generation(self, generation: int) -> None:
        """Writes down the facts of a generation, and what the policy makes of them."""
        facts = without_processes(JOB.facts(), {LOST})
        self.facts = dataclasses.replace(facts, generation=generation)
        self.planned()

    def planned(self) -> None:
        """Makes the plan of the facts."""
        """Writes down what the policy makes of the facts."""
        self.plan = plan_recovery(self.facts)
        self.goes_on_with = self.plan.target + 1
        self.plan_fields: dict[str, str] | None = {"digest": self.plan.digest}

    def outcome(self, monkeypatch: pytest.MonkeyPatch) -> Outcome:
        """Writes it all and returns it."""
        launch = self.folder / "launch0"
        (launch / "events").mkdir(parents=True)
        monkeypatch.setattr("time.time", self._now)
        monkeypatch.setattr("time.time_ns", lambda: int(self._now() * 1e9))
        for rank in range(4):
            self._train(rank, launch / "events")
        self.clock = 100.0
        self._gather(launch / "events", self.facts if self.before is None else self.before)
        for rank in range(4):
            self._plan(rank, launch / "events")
        if self.before is not None:
            self._gather(launch / "events", self.facts)
        for rank in range(4):
            self._recover(rank, launch / "events")
        for process, text in self.said.items():
            (launch / f"rank{process}.stderr").write_text(text)
        ended = LaunchOutcome(
            launch=dataclasses.replace(SCENARIO.history.launches[0], faults=self.faults),
            folder=launch,
            pids=(10, 11, 12, 13, 14),
            exit_codes=tuple(self.codes),
            timed_out=self.timed_out,
            seconds=1.0,
            killed=(Killed(LOST, self.killed_at, False),),
            missed=0,
            left=self.left,
            orphans=self.orphans,
        )
        return Outcome((ended,), DIGEST, self.digest)

    def _now(self) -> float:
        self.clock += 0.01
        return self.clock

    def _train(self, rank: int, folder: Path) -> None:
        self.clock = 1.0
        with EventLog(folder, rank, 0) as events:
            for step in range(1, self.newest + 1):
                self.clock = step
                events.emit(EventName.ITERATION, step)
                if step == 12:
                    window = {"start": 9, "size": 3, "lag": 1, "copies": self.copies}
                    events.emit(EventName.WINDOW_PERSISTED, step, **window)
            if self.tier and rank == 0:
                tier = {"start": self.tier - 3, "size": 3, "tier_bytes": 1, "duration_s": 1.0}
                events.emit(EventName.TIER_WRITTEN, self.tier, **tier)

    def _gather(self, folder: Path, facts: Facts) -> None:
        self.clock += 0.01
        with EventLog(folder, 0, facts.generation) as events:
            events.keep(FACTS, dump_facts(facts))

    def _plan(self, rank: int, folder: Path) -> None:
        with EventLog(folder, rank, self.facts.generation) as events:
            fields = {
                "verdict": self.plan.verdict.value,
                "target": self.plan.target,
                **(self.plan_fields or {}),
            }
            if self.plan_fields is not None:
                events.emit(EventName.PLAN, 13, **fields)

    def _recover(self, rank: int, folder: Path) -> None:
        with EventLog(folder, rank, self.facts.generation) as events:
            replays = self.replayed if rank == LOST else []
            for step in replays:
                events.emit(EventName.REPLAY, step, replay_verified=self.verified)
            events.emit(
                EventName.RECOVERED,
                13,
                replayed_steps=self.plan.target - self.plan.start(LOST) if rank == LOST else 0,
                forward_passes=6 if rank == LOST else self.passes,
                backward_passes=0,
            )
            events.emit(EventName.ITERATION, self.goes_on_with)


DURABLE = 8


class RunThatGoesBack(Run):
    """A run in which all memory is lost, that goes back to a durable checkpoint."""

    def __init__(self, folder: Path) -> None:
        """As a run, whose processes hold nothing."""
        super().__init__(folder)
        processes = tuple(dataclasses.replace(one, persisted=None) for one in self.facts.processes)
        self.found_first = dataclasses.replace(self.facts, processes=processes, durable=DURABLE)
        processes = tuple(
            dataclasses.replace(one, holdings=(), live=LiveState(Condition.ABSENT))
            for one in processes
        )
        self.facts = dataclasses.replace(self.found_first, processes=processes)
        self.planned()
        self.replayed = []
        self.passes = 0
        self.said[0] = f"ROLLBACK: {self.plan.reason}\n"

    def is_written(self, folder: Path, at: float, monkeypatch: pytest.MonkeyPatch) -> None:
        """Writes the facts of this recovery into a folder of events, as of some time."""
        monkeypatch.setattr("time.time_ns", lambda: int(at * 1e9))
        with EventLog(folder, 0, 1) as events:
            events.keep(FACTS, dump_facts(self.facts))

    def forgets(self) -> tuple[Killed, ...]:
        """Loses the memory of more processes than there are copies."""
        return tuple(Killed(process, 90.0, True) for process in range(4))
