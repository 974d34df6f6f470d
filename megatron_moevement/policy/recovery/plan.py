# SPDX-License-Identifier: Apache-2.0
"""The plan of a recovery: frozen data that every rank makes alike and executes without thinking."""

from __future__ import annotations

import dataclasses
import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

from megatron_moevement.policy.copies.persistence import SlotKey, slot_keys
from megatron_moevement.policy.job.boundary import Direction
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.job.segments import ScopeKind, Segment
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.policy.window.timetable import Timetable, UnknownScheduleError

_RANK = attrgetter("rank")


class Verdict(Enum):
    """What a recovery comes down to."""

    RESUME = "RESUME"
    """No state is lost: everybody goes on from the target."""

    COPIED = "COPIED"
    """What was lost is copied from the live state of ranks that hold the same; nobody replays."""

    LOCALIZED = "LOCALIZED"
    """Some stages replay, the others serve their logs and wait."""

    GLOBAL = "GLOBAL"
    """All stages replay."""

    ROLLBACK = "ROLLBACK"
    """Everybody loads the newest durable checkpoint; the steps after it are lost."""


class WindowEdges(Enum):
    """Where windows begin once a plan is carried out."""

    KEPT = "kept"
    """Where they would have begun without the fault."""

    RESTARTED = "anew"
    """At the state that everybody goes on from: the target, or what is durable. All slots and logs
    from before are dropped, and all ledger entries that no replay needs."""


class Origin(Enum):
    """What a replaying stage starts from."""

    WINDOW = "window"
    """Slot 0 of the window."""

    KEPT = "kept"
    """The state that its interrupted replay had reached."""

    DURABLE = "durable"
    """What a launch would begin with: the newest durable checkpoint, or the initial state."""


@dataclasses.dataclass(frozen=True, order=True)
class StageReplay:
    """What one stage replays.

    Attributes:
        start: k of the S_k that it starts from; it replays the steps (start, target].
        converts: whether it puts slots of the plan's window back, from the slot of that state on.
    """

    stage: int
    start: int
    origin: Origin = dataclasses.field(compare=False)
    converts: bool = dataclasses.field(default=False, compare=False)


@dataclasses.dataclass(frozen=True)
class SlotFetch:
    """A slot that a rank has in its ring before it goes on.

    Attributes:
        slot: which one; a slot of a replica stands in for one of the rank that nobody has.
        sources: the processes that have it, in the order in which they are asked. The rank's own
            process comes first where it has the slot.
    """

    rank: LogicalRank
    slot: SlotKey
    sources: tuple[int, ...]

    @property
    def source(self) -> int:
        """The process that is asked first."""
        return self.sources[0]

    def lacking(self, holders: tuple[int, ...]) -> tuple[int, ...]:
        """Returns which of the rank's holders lack the slot.

        Where a replica's slot stands in for the rank's own, nobody has that one.
        """
        having = self.sources if self.slot.owner == self.rank else ()
        return tuple(holder for holder in holders if holder not in having)


@dataclasses.dataclass(frozen=True)
class SlotsFetch:
    """Slots that a rank has in its ring before it goes on, all from the same processes.

    Attributes:
        owner: whose slots they are.
        slots: for each of their windows which of its slots are meant, as bits.
        sources: as of each `SlotFetch`.
    """

    rank: LogicalRank
    owner: LogicalRank
    slots: tuple[tuple[Window, int], ...]
    sources: tuple[int, ...]

    def each(self) -> Iterator[SlotFetch]:
        """Yields the slots, by window and step."""
        for window, slots in self.slots:
            for key in slot_keys(self.owner, window, slots):
                yield SlotFetch(self.rank, key, self.sources)


@dataclasses.dataclass(frozen=True)
class SlotSend:
    """A slot that a rank sends off once it has what it fetches.

    Attributes:
        to: the processes that are to keep it and lack it; none where all have it already.
    """

    slot: SlotKey
    to: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class StateCopy:
    """A rank that takes its state at the target from the live state of a survivor.

    Attributes:
        source: the process that is copied from, once it has rolled forward.
    """

    rank: LogicalRank
    source: int


@dataclasses.dataclass(frozen=True)
class LogSource:
    """Which steps of a boundary, first to last, come from a log and not from a live neighbour.

    Each rank of the receiving stage reads from the rank with the same other coordinates.

    Attributes:
        receiver: the stage that replays.
        sender: the stage whose ranks serve their logs.
    """

    receiver: int
    sender: int
    direction: Direction
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class RollForward:
    """A rank that applies a step whose gradients it has, with the scalars of the ledger."""

    rank: LogicalRank
    step: int


class Schedules(NamedTuple):
    """The window schedules that a job goes on with.

    Attributes:
        timetable: when each is in force; None where nobody knows of any.
        source: a process that has all of them; None where nobody has.
    """

    timetable: Timetable | None = None
    source: int | None = None

    @property
    def known(self) -> Timetable:
        """When each is in force, in a job of which a step is known to be committed.

        Raises:
            UnknownScheduleError: nobody knows.
        """
        if self.timetable is None:
            raise UnknownScheduleError("no process has a window schedule")
        return self.timetable


NO_SCHEDULES = Schedules()


@dataclasses.dataclass(frozen=True)
class RankPlan:
    """What one rank does.

    Attributes:
        start: k of the S_k that it replays from; the target where it stands by.
        origin: what it replays from; None where it stands by.
        converts: whether it puts slots back, from that of S_start on.
        copied_from: the process that it takes its state from; None where it keeps or replays it.
        fetches: the slots that its ring holds afterwards, by step.
        sends: what holders lack of these, by step.
        oldest: step of the oldest slot that its ring is to hold.
        next_step: k of the S_k that is captured first.
        guarded: the window of which each slot has a copy before training goes on, if any.
    """

    rank: LogicalRank
    start: int
    origin: Origin | None
    converts: bool
    copied_from: int | None
    fetches: tuple[SlotFetch, ...]
    sends: tuple[SlotSend, ...]
    oldest: int
    next_step: int
    guarded: Window | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the processes of a generation do until training goes on.

    Attributes:
        generation: of the facts that it was made from.
        reason: why, in one line.
        target: T, the newest step that any survivor has committed; training goes on with T + 1.
            After a rollback, the step of the durable checkpoint.
        persisted: the job's newest persisted window; every rank goes on with this knowledge.
        window: the window that is replayed from; None too where all replay from what is durable.
        roll_forward: who applies finished gradients before anything is reset.
        replays: the stages in scope, ascending; all others are bystanders.
        segments: the same stages as runs of neighbours.
        fetches: who gets which slots from where, by rank: what a replay loads, and what
            a rank that goes on from its state has of the windows that are still needed.
        holders: by rank, the processes that keep copies of its slots: it sends them what they lack.
        logs: what bystanders, and stages that are ahead, serve.
        ledger_source: the process that has all ledger entries that are needed.
        rollbacks: how many rollbacks lie behind the job once the plan is carried out.
        schedules: that all go on with. A replay captures the slots of windows in flight again under
            those windows' own schedules: a moved edge would pin the old window for ever where
            faults come closer than W steps.
        edges: whether windows go on, or begin anew because nothing is left to replay from.
        copies: who takes its state from whom, by rank; their stages stand by.
        lost_steps: committed steps that are done again after a rollback; None where nobody knows
            how many.
    """

    generation: int
    verdict: Verdict
    reason: str
    target: int
    persisted: Window | None = None
    window: Window | None = None
    roll_forward: tuple[RollForward, ...] = ()
    replays: tuple[StageReplay, ...] = ()
    segments: tuple[Segment, ...] = ()
    scope_kind: ScopeKind = ScopeKind.NONE
    fetches: tuple[SlotsFetch, ...] = ()
    holders: Mapping[LogicalRank, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    logs: tuple[LogSource, ...] = ()
    ledger_source: int | None = None
    rollbacks: int = 0
    schedules: Schedules = NO_SCHEDULES
    edges: WindowEdges = WindowEdges.KEPT
    copies: tuple[StateCopy, ...] = ()
    lost_steps: int | None = 0

    @property
    def loses_steps(self) -> bool:
        """Whether committed steps are done again, or nobody knows that none are."""
        return self.lost_steps != 0

    @property
    def replayed_steps(self) -> int:
        """Steps that the stage furthest back replays, the interrupted step's redo apart."""
        return max((self.target - replay.start for replay in self.replays), default=0)

    @property
    def first_ledger_step(self) -> int:
        """The first step whose ledger entry somebody needs, if it is there."""
        steps = [self.target, *(replay.start + 1 for replay in self.replays)]
        steps += [roll.step for roll in self.roll_forward]
        if self.copies and self.persisted is not None:
            steps.append(self.persisted.start + 1)
        return min(steps)

    def rolled(self, rank: LogicalRank) -> tuple[int, ...]:
        """Returns the steps that a rank applies before anything is reset."""
        return tuple(roll.step for roll in self.roll_forward if roll.rank == rank)

    @property
    def is_apart(self) -> bool:
        """Whether stages replay without all others: some stand by, or begin at other steps."""
        starts = {replay.start for replay in self.replays}
        return self.verdict is Verdict.LOCALIZED or len(starts) > 1

    @property
    def is_from_durable(self) -> bool:
        """Whether all stages load what is durable and replay from there."""
        return self.loaded is not None

    @property
    def loaded(self) -> int | None:
        """The step of the durable state that all stages replay from, if they do."""
        steps = (each.start for each in self.replays if each.origin is Origin.DURABLE)
        return next(steps, None)

    @cached_property
    def start_of(self) -> dict[int, int]:
        """For each stage in scope the step whose state it starts from."""
        return {replay.stage: replay.start for replay in self.replays}

    def start(self, stage: int) -> int:
        """Returns k of the S_k that a stage starts from; the target for a bystander."""
        return self.start_of.get(stage, self.target)

    def origin(self, stage: int) -> Origin | None:
        """Returns what a stage starts from, None for a bystander."""
        return next((each.origin for each in self.replays if each.stage == stage), None)

    def gives_up(self, stage: int) -> bool:
        """Returns whether a stage replays from elsewhere than its state: that is of no use then."""
        return self.origin(stage) in {Origin.WINDOW, Origin.DURABLE}

    def fetches_of(self, rank: LogicalRank) -> tuple[SlotFetch, ...]:
        """Returns what a rank gets, by step."""
        begin = bisect_left(self.fetches, rank, key=_RANK)
        end = bisect_right(self.fetches, rank, begin, key=_RANK)
        fetches = [one for fetch in self.fetches[begin:end] for one in fetch.each()]
        return tuple(sorted(fetches, key=lambda fetch: fetch.slot.step))

    def slot_fetches(self) -> Iterator[SlotFetch]:
        """Yields what all ranks get, by rank."""
        for fetch in self.fetches:
            yield from fetch.each()

    def for_rank(self, rank: LogicalRank) -> RankPlan:
        """Returns what one rank does."""
        start, fetches = self.start(rank.pp), self.fetches_of(rank)
        steps = [fetch.slot.step for fetch in fetches]
        next_step = max(steps) + 1 if start in steps else start
        sends = self._sends_of(rank, next_step)
        kept_from = start if self.persisted is None else self.persisted.start
        first = min((send.slot.window for send in sends), default=None)
        slots = sum(send.slot.window == first for send in sends)
        return RankPlan(
            rank=rank,
            start=start,
            origin=self.origin(rank.pp),
            converts=any(each.converts for each in self.replays if each.stage == rank.pp),
            copied_from=next((copy.source for copy in self.copies if copy.rank == rank), None),
            fetches=fetches,
            sends=sends,
            oldest=min([start, kept_from, *steps]),
            next_step=next_step,
            guarded=first if first is not None and slots == first.size else None,
        )

    def _sends_of(self, rank: LogicalRank, next_step: int) -> tuple[SlotSend, ...]:
        """Returns what a rank sends of the slots that it has: no persisted window with a gap.

        After a replay from an older window the rest of the persisted one is captured again.
        """
        fetches, persisted = self.fetches_of(rank), self.persisted
        holders = self.holders.get(rank, ())
        has_gap = persisted is not None and sum(
            fetch.slot.window == persisted for fetch in fetches
        ) < min(persisted.size, next_step - persisted.start)
        return tuple(
            SlotSend(fetch.slot._replace(owner=rank), fetch.lacking(holders))
            for fetch in fetches
            if fetch.slot.window != persisted or not has_gap
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256, as hex, over the whole plan: compared by all ranks before a byte moves."""
        parts = [repr(getattr(self, field.name)) for field in dataclasses.fields(self)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()
