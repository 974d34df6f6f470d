# SPDX-License-Identifier: Apache-2.0
"""The world: processes, time and chance, from the start of a job to its end."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.recovery.lifecycle import Phase
from megatron_moevement.policy.recovery.plan import Plan
from megatron_moevement.policy.window.timetable import TimetableEntry
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.testing.world.clock import Clock
from megatron_moevement.testing.world.commits import Commits
from megatron_moevement.testing.world.fault_injection import FaultInjection
from megatron_moevement.testing.world.invariants import Invariants
from megatron_moevement.testing.world.link_times import LinkTimes
from megatron_moevement.testing.world.network import Network
from megatron_moevement.testing.world.policies import Policies
from megatron_moevement.testing.world.process import (
    At,
    Join,
    Pass,
    Process,
    Receive,
    Sleep,
    Until,
)
from megatron_moevement.testing.world.proposals import Proposals
from megatron_moevement.testing.world.reference import Reference
from megatron_moevement.testing.world.replicator import Replicator
from megatron_moevement.testing.world.restarts import Restarts
from megatron_moevement.testing.world.scenario import Scenario
from megatron_moevement.testing.world.shape import shape_of
from megatron_moevement.testing.world.storage import Checkpoints, Machines
from megatron_moevement.testing.world.tokens import Tokens
from megatron_moevement.testing.world.values import History
from megatron_moevement.testing.world.violations import ViolationError

MAX_TIME, MAX_MEASURED_TIME = 20_000.0, 100_000.0
"""Units of time that no job and no recovery takes; the second where links may be slow and lossy."""

MAX_TICKS = 40_000
"""A world of several faults ends after some thousand commands, or goes round in circles."""


@dataclasses.dataclass
class Outcome:
    """How a run went.

    Attributes:
        plans: the plan of every generation that agreed on one.
        aborted: the reason, when the job ended unfinished.
        ticks: commands that the world executed.
        lags: L of every window that was persisted.
        places: the fault places of production that processes came to.
        schedules: that all ranks have agreed on.
        reasons: for which another schedule was considered.
    """

    plans: list[Plan] = dataclasses.field(default_factory=list)
    aborted: str | None = None
    ticks: int = 0
    lags: list[int] = dataclasses.field(default_factory=list)
    places: set[FaultPoint] = dataclasses.field(default_factory=set)
    schedules: list[TimetableEntry] = dataclasses.field(default_factory=list)
    reasons: set[str] = dataclasses.field(default_factory=set)


class World:
    """One simulated run of one job; its decisions are the real ones where no others are given."""

    def __init__(self, scenario: Scenario, policies: Policies | None = None) -> None:
        self.scenario = scenario
        self.policies = policies or Policies()
        self.random = random.Random(f"world {scenario.seed}")  # noqa: S311  (reproducible)
        self.clock = Clock()
        self.story: list[str] = []
        self.history = History()
        self.shape = shape_of(scenario)
        self.reference = Reference(self.history, scenario, self.shape)
        self.outcome = Outcome()
        self.processes: dict[int, Process] = {}
        self.finished = False
        self.is_over = False
        self.invariants = Invariants(self)
        self.network = Network(self)
        self.tokens = Tokens(scenario, self.shape)
        self.link_times = LinkTimes(self)
        self.replicator = Replicator(self)
        self.commits = Commits(self)
        self.proposals = Proposals(self)
        self.durable = Checkpoints(self)
        self.machines = Machines(self)
        self.faults = FaultInjection(self)
        self.restarts = Restarts(self)

    @property
    def live(self) -> list[Process]:
        """The processes that have neither died nor ended, by number."""
        return [
            process
            for process in self.processes.values()
            if process.alive and process.phase is not Phase.ENDING
        ]

    def run(self) -> Outcome:
        """Runs the job to its end and returns how it went.

        Raises:
            ViolationError: an invariant does not hold.
        """
        measures = self.scenario.conditions.measures
        most_time = MAX_MEASURED_TIME if measures else MAX_TIME
        self.restarts.launch()
        while not self.finished and not self.is_over:
            event = self.clock.pop()
            is_late = self.clock.now > most_time or self.outcome.ticks > MAX_TICKS
            if event is None or is_late:
                raise ViolationError("8 training resumes", self._standstill())
            action, arguments = event
            action(*arguments)
            self.invariants.tick()
        if self.finished:
            for process in self.processes.values():
                if process.alive and process.rank is not None:
                    self.invariants.is_dense(process, self.scenario.steps)
        return self.outcome

    def _standstill(self) -> str:
        waits = [f"{process} {process.phase.value}: {process.wait}" for process in self.live]
        return "nothing moves any more\n" + "\n".join(waits)

    def resume(self, process: Process, value: Any = None) -> None:
        """Lets a process go on until it has to wait; every command is one tick."""
        program = process.program
        while program is not None and process.program is program:
            self.outcome.ticks += 1
            self.faults.strike(process)
            if isinstance(process.wait, At):
                whose = process.wait.whose
                actor = process if whose is None else self.processes[whose]
                self.faults.pass_by(actor, process.wait.place)
            if process.program is not program or process.hung:
                return
            try:
                wait = program.send(value)
            except StopIteration:
                process.program = None
                process.wait = None
                return
            self.invariants.tick()
            process.wait = wait
            value = None
            if isinstance(wait, Pass | At):
                continue
            if isinstance(wait, Receive) and wait.tag in process.mailbox:
                value = process.mailbox.pop(wait.tag)
                continue
            if isinstance(wait, Until) and wait.holds():
                continue
            if isinstance(wait, Sleep):
                self.clock.after(wait.duration, self._wake, process, wait)
            elif isinstance(wait, Join):
                self.network.join(process, wait)
            return

    def _wake(self, process: Process, sleep: Sleep) -> None:
        if process.wait is sleep and process.program is not None:
            self.resume(process)

    def poke(self, process: Process) -> None:
        """Lets a process look whether it still has to wait."""
        wait = process.wait
        if process.program is None:
            return
        if isinstance(wait, Receive) and wait.tag in process.mailbox:
            self.resume(process, process.mailbox.pop(wait.tag))
        elif isinstance(wait, Until) and wait.holds():
            self.resume(process)

    def all_join(
        self,
        process: Process,
        *name: Any,
        value: Any = None,
        combine: Callable[[dict[Any, Any]], Any] = len,
    ) -> Join:
        """Returns a collective of all processes of the generation, for one of them."""
        return Join(name, self.restarts.beginning.members, process.number, value, combine)

    def occupant(self, rank: LogicalRank) -> Process | None:
        """Returns the live process that occupies a logical rank."""
        return next((process for process in self.live if process.rank == rank), None)

    def neighbour(self, process: Process, stage: int) -> Process | None:
        """Returns who occupies the rank of a stage with the same other coordinates."""
        return self.occupant(process.place._replace(pp=stage))

    def note_plan(self, plan: Plan) -> None:
        """Keeps the plan of a generation, once."""
        plans = self.outcome.plans
        if not plans or plans[-1].generation != plan.generation:
            plans.append(plan)
            self.report(f"{plan.verdict.value} to step {plan.target}: {plan.reason}")

    def report(self, what: str) -> None:
        """Adds to the story."""
        now, tick, generation = self.clock.now, self.outcome.ticks, self.restarts.generation
        self.story.append(f"{now:9.2f}  tick {tick:5}  generation {generation}  {what}")
