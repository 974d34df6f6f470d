# SPDX-License-Identifier: Apache-2.0
"""A simulated process: its state, its store, and what it is doing."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Generator, Sequence
from typing import Any

from megatron_moevement.policy.copies.peer_trouble import Trouble
from megatron_moevement.policy.copies.persistence import Acknowledgements, SlotKey
from megatron_moevement.policy.copies.placement import Host
from megatron_moevement.policy.copies.slot_ring import SlotRing
from megatron_moevement.policy.facts.facts import Condition, LiveState, ProcessFacts
from megatron_moevement.policy.job.boundary import BoundaryTag
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.recovery.lifecycle import Event, Phase, advance
from megatron_moevement.policy.recovery.plan import Plan
from megatron_moevement.policy.watching import measurements
from megatron_moevement.policy.window.popularity import CountedSteps
from megatron_moevement.policy.window.schedule import Window, WindowSchedule
from megatron_moevement.policy.window.timetable import Timetable, TimetableEntry
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.testing.lost_states import LostStates
from megatron_moevement.testing.world.arithmetic import Entry, Local, Reduced
from megatron_moevement.testing.world.live import Live
from megatron_moevement.testing.world.scheduling import Proposed, Scheduling
from megatron_moevement.testing.world.shape import Shape
from megatron_moevement.testing.world.simulated_store import Store
from megatron_moevement.testing.world.tokens import Counts


@dataclasses.dataclass(frozen=True)
class Pass:
    """Go on at once; a fault may come in between."""


@dataclasses.dataclass(frozen=True)
class At:
    """Go on at once; production has a fault place here.

    Attributes:
        place: which one.
        whose: number of the process that comes to it, None for the own one.
    """

    place: FaultPoint
    whose: int | None = None


@dataclasses.dataclass(frozen=True)
class Sleep:
    """Take a while."""

    duration: float


@dataclasses.dataclass(frozen=True)
class Receive:
    """Wait for a boundary tensor."""

    tag: BoundaryTag


@dataclasses.dataclass(frozen=True)
class Until:
    """Wait until something in the own process holds."""

    holds: Callable[[], bool]
    what: str


@dataclasses.dataclass(frozen=True)
class Join:
    """Take part in a collective and wait for its result.

    Attributes:
        name: what it is for; with the generation it identifies the collective.
        members: who takes part.
        me: which of them this is.
        value: what it contributes.
        combine: makes the result from all contributions; called once.
        suffice: whether so many of so many contributions make a result.
    """

    name: tuple[Any, ...]
    members: Sequence[Any]
    me: Any
    value: Any
    combine: Callable[[dict[Any, Any]], Any]
    suffice: Callable[[int, int], bool] = operator.eq


Wait = Pass | At | Sleep | Receive | Until | Join
Commands = Generator[Wait, Any, None]


@dataclasses.dataclass
class Run:
    """What a rank has in hand of the step it works on: gone when the step is committed.

    Attributes:
        step: its number.
        plan: the plan under which it is replayed, None in training.
        local: its own gradients.
        reduced: the reduced ones.
        entry: what goes into the ledger.
        agreed_persisted: the window that it told to be persisted.
        agreed_copies: the fewest copies of a slot of that window, as it told.
        agreed_schedule: the schedule that it told all ranks to know, if it is another one.
        complete: the newest window of which all copies are made, once it has waited for them.
        copies: the fewest copies of a slot of the persisted window then.
        counts: the tokens that it sent to which expert.
        waits_since: when it began to wait for copies.
        measured: what all ranks have measured until it, as it told.
        finished: whether the gradients are complete, reduced and logged.
        logged_at: when the last copy to the upstream log lands.
    """

    step: int
    plan: Plan | None = None
    local: Local | None = None
    reduced: Reduced | None = None
    entry: Entry | None = None
    agreed_persisted: Window | None = None
    agreed_copies: int = 0
    agreed_schedule: Proposed | None = None
    complete: Window | None = None
    copies: int = 0
    counts: Counts = ()
    waits_since: float = 0.0
    measured: measurements.Reduced = measurements.NOT_MEASURED
    finished: bool = False
    logged_at: float = 0.0


@dataclasses.dataclass
class Process:
    """One process of the simulated cluster.

    Attributes:
        number: unique among all processes that the job ever had.
        machine: where its store lies in memory.
        index: its number among those of its launch.
        is_new: whether it has never had a state of the job.
        is_open: whether it has opened its store.
        has_looked: whether it has looked for what others left of its rank.
        left_behind: processes whose stores lay on its machine when the generation began.
        has_left: whether what others left may still be there.
        rank: the logical rank that it occupies, None for a spare.
        timetable: the window schedules that it goes by.
        first_schedule: the schedule that all processes make alike.
        scheduling: what it has of schedules to come in this generation.
        counted: steps of which it has counted tokens.
        counts: of these steps together.
        store: what outlives an interrupt.
        holders: who keeps copies of its slots.
        damaged: own slots that were found damaged in this generation, before they were sent.
        troubles: with transfers to other processes, in this generation.
        capturing: the slot whose copy to the host is under way.
        mailbox: boundary tensors that arrived.
    """

    number: int
    domain: str
    rank: LogicalRank | None
    ring: SlotRing
    timetable: Timetable
    first_schedule: WindowSchedule
    scheduling: Scheduling = dataclasses.field(default_factory=Scheduling)
    counted: CountedSteps = CountedSteps()  # noqa: RUF009  (frozen)
    counts: Counts = ()
    store: Store = dataclasses.field(default_factory=Store)
    live: Live | None = None
    run: Run | None = None
    acknowledgements: Acknowledgements = dataclasses.field(default_factory=Acknowledgements)
    holders: tuple[int, ...] = ()
    damaged: set[SlotKey] = dataclasses.field(default_factory=set)
    troubles: dict[int, Trouble] = dataclasses.field(default_factory=dict)
    capturing: SlotKey | None = None
    phase: Phase = Phase.PLANNING
    generation: int = 0
    program: Commands | None = None
    wait: Wait | None = None
    mailbox: dict[BoundaryTag, int] = dataclasses.field(default_factory=dict)
    machine: str = ""
    index: int = 0
    is_new: bool = True
    is_open: bool = False
    has_looked: bool = False
    left_behind: frozenset[int] = frozenset()
    has_left: bool = True
    alive: bool = True
    hung: bool = False

    @property
    def place(self) -> LogicalRank:
        """The logical rank of a process that has one."""
        assert self.rank is not None
        return self.rank

    @property
    def state(self) -> Live:
        """The live state of a process that has one."""
        assert self.live is not None
        return self.live

    @property
    def host(self) -> Host:
        """What placement knows of it."""
        return Host(self.number, self.domain, self.rank)

    def __str__(self) -> str:
        place = (
            "spare" if self.rank is None else f"pp{self.rank.pp}.dp{self.rank.dp}.ep{self.rank.ep}"
        )
        return f"p{self.number}({place})"

    def schedule(self, entry: TimetableEntry) -> WindowSchedule:
        """Returns a schedule of the timetable, which the process has to have learnt."""
        if entry.digest == self.first_schedule.digest:
            return self.first_schedule
        return self.store.schedules[entry.digest]

    def advance(self, event: Event) -> None:
        """Enters the phase that follows an event."""
        self.phase = advance(self.phase, event)

    def facts(self, shape: Shape, lost: LostStates) -> ProcessFacts:
        """Returns what the process publishes at the start of a recovery.

        Random streams are part of the cursor, which all ranks share: replicas are always alike.
        """
        store = self.store
        holds = None
        if lost is LostStates.COPIED and self.rank is not None:
            holds = ",".join(str(one) for part in shape.parts[self.rank] for one in part.operators)
        return ProcessFacts(
            process=self.number,
            domain=self.domain,
            rank=self.rank,
            committed=store.committed,
            live=self._live_state(),
            persisted=store.persisted,
            holdings=store.holdings(),
            logs=() if self.rank is None else store.log_extents(shape, self.rank.pp),
            ledger=store.ledger_steps(),
            rollbacks=store.rollbacks,
            timetable=store.timetable,
            replica_id=holds,
            rng_equal_steps=range(0) if holds is None else store.ledger_steps(),
            is_new=self.is_new,
            holders=self.holders,
        )

    def _live_state(self) -> LiveState:
        live, run = self.live, self.run
        if live is None:
            return LiveState(Condition.ABSENT)
        if live.torn:
            return LiveState(Condition.TORN, live.step)
        finished = run.step if run is not None and run.finished else None
        condition = Condition.DENSE if live.window is None else Condition.PARTIAL
        return LiveState(condition, live.step, live.window, finished)
