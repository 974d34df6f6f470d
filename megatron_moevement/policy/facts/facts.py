# SPDX-License-Identifier: Apache-2.0
"""Facts: what every process tells the others at the start of a recovery."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cached_property

from megatron_moevement.errors import MoEvementError
from megatron_moevement.policy.job.boundary import Direction
from megatron_moevement.policy.job.ranks import Layout, LogicalRank
from megatron_moevement.policy.job.segments import Ends
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.policy.window.timetable import Timetable


class InconsistentFactsError(MoEvementError, RuntimeError):
    """The facts contradict the protocol of a step: recovering on them would corrupt the state."""


class Condition(Enum):
    """What a process's live state is worth."""

    DENSE = "dense"
    """All operators are active: the state is S_step."""

    PARTIAL = "partial"
    """A replay was interrupted while it converted a window: the operators of the slots before
    `step` are active at S_step, the others wait for their slots."""

    TORN = "torn"
    """A commit began and did not end: neither the old state nor the new one."""

    ABSENT = "absent"
    """A new process, or one that gave its state up."""


@dataclasses.dataclass(frozen=True)
class LiveState:
    """The state that a process trains on.

    Attributes:
        step: k of the S_k that it holds, when it is dense or partial.
        window: the window that is being converted, when it is partial.
        finished: the step whose gradients are complete, reduced, logged and not yet applied.

    Raises:
        ValueError: the window is missing or superfluous, or does not contain the step.
    """

    condition: Condition
    step: int = 0
    window: Window | None = None
    finished: int | None = None

    def __post_init__(self) -> None:
        partial = self.condition is Condition.PARTIAL
        if partial != (self.window is not None):
            raise ValueError(f"a {self.condition.value} state with the window {self.window}")
        if self.window is not None and not self.window.start <= self.step <= self.window.last:
            raise ValueError(f"a partial state at step {self.step} outside of {self.window}")


@dataclasses.dataclass(frozen=True)
class Holding:
    """Slots of one rank's window that a process has, with valid checksums.

    Attributes:
        slots: bit j is set when slot j is there.

    Raises:
        ValueError: a bit lies outside of the window.
    """

    owner: LogicalRank
    window: Window
    slots: int

    def __post_init__(self) -> None:
        if not 0 <= self.slots < 1 << self.window.size:
            raise ValueError(f"slots {self.slots:b} do not fit {self.window}")


@dataclasses.dataclass(frozen=True)
class LogExtent:
    """Steps whose boundary tensors a process has logged whole and with valid checksums."""

    direction: Direction
    steps: frozenset[int]


@dataclasses.dataclass(frozen=True)
class ProcessFacts:
    """What one process publishes.

    Attributes:
        process: its number, unique among all processes that the job ever had.
        rank: the logical rank that it occupies; None for a spare.
        committed: the newest step that it knows to be committed, None when it knows of none. In a
            replay this is the target: what was committed stays committed.
        persisted: the newest window that it learnt to be persisted for the job.
        holdings: slots that it has, its own rank's and others'.
        ledger: steps whose ledger entries it has.
        rollbacks: how many rollbacks to a durable checkpoint precede what it has. What is left
            from before one must not mix with what the rollback began.
        replica_id: names what its rank trains, where every rank that trains it holds all of it:
            ranks with the same name hold the same bits at the same step. None where something is
            the rank's own, as a shard of the optimizer's state is, or nothing is to be copied.
        rng_equal_steps: steps k in whose S_k all ranks with the same name had, as it has recorded,
            the same random streams.
        timetable: the window schedules that it knows the job to have agreed on, None when it knows
            of none.
        is_new: whether it has never held a state of the job: what it has was left by others, and
            says nothing of what the job has agreed on since.
        holders: the processes that keep copies of its rank's slots in this generation.
    """

    process: int
    domain: str
    rank: LogicalRank | None
    committed: int | None
    live: LiveState
    persisted: Window | None = None
    holdings: tuple[Holding, ...] = ()
    logs: tuple[LogExtent, ...] = ()
    ledger: range = range(0)
    rollbacks: int = 0
    timetable: Timetable | None = None
    replica_id: str | None = None
    rng_equal_steps: range = range(0)
    is_new: bool = False
    holders: tuple[int, ...] = ()

    def logged(self, direction: Direction) -> frozenset[int]:
        """Returns the steps that it has logged of what its rank sent in a direction."""
        return next((log.steps for log in self.logs if log.direction is direction), frozenset())


@dataclasses.dataclass(frozen=True)
class Facts:
    """What all live processes of a generation know, the same on every one of them.

    Attributes:
        durable: step of the newest whole durable checkpoint, or of the initial state where it can
            be built anew (0).
        processes: what the processes published, in any order.

    Raises:
        ValueError: two processes have one number or occupy one rank, or a rank is not of the job.
    """

    generation: int
    layout: Layout
    ends: Ends
    durable: int
    processes: tuple[ProcessFacts, ...]

    def __post_init__(self) -> None:
        numbers = {facts.process for facts in self.processes}
        if len(numbers) < len(self.processes):
            raise ValueError("two processes have one number")
        occupied = [facts.rank for facts in self.processes if facts.rank is not None]
        if len(self.by_rank) < len(occupied):
            raise ValueError("two processes occupy one logical rank")
        strange = [rank for rank in self.by_rank if rank not in self.layout]
        if strange:
            raise ValueError(f"{min(strange)} is no rank of {self.layout}")

    @property
    def is_continuing(self) -> bool:
        """Whether the job has trained before, as far as its processes know."""
        return self.generation > 0 or any(each.committed is not None for each in self.processes)

    @cached_property
    def by_rank(self) -> dict[LogicalRank, ProcessFacts]:
        """The processes that occupy a logical rank."""
        return {facts.rank: facts for facts in self.processes if facts.rank is not None}

    def copies(self, owner: LogicalRank) -> Mapping[Window, Mapping[int, int]]:
        """Returns for each window of a rank the processes that have slots of it, and which."""
        found: dict[Window, dict[int, int]] = {}
        for facts in self._keepers.get(owner, ()):
            for held in facts.holdings:
                if held.owner == owner:
                    copies = found.setdefault(held.window, {})
                    copies[facts.process] = copies.get(facts.process, 0) | held.slots
        return found

    @cached_property
    def _keepers(self) -> Mapping[LogicalRank, Sequence[ProcessFacts]]:
        """For each rank the processes that have slots of it."""
        found: dict[LogicalRank, list[ProcessFacts]] = {}
        for facts in self.processes:
            for owner in {held.owner for held in facts.holdings}:
                found.setdefault(owner, []).append(facts)
        return found

    @cached_property
    def logged(self) -> Mapping[tuple[int, Direction], frozenset[int]]:
        """For each stage and direction the steps that all of the stage's ranks have logged."""
        return {
            (stage, direction): frozenset.intersection(
                *(facts.logged(direction) for facts in self.stage(stage))
            )
            for stage in range(self.layout.pp)
            for direction in Direction
        }

    def stage(self, stage: int) -> Sequence[ProcessFacts]:
        """Returns the processes that occupy ranks of a pipeline stage, by rank."""
        return self._stages.get(stage, ())

    @cached_property
    def _stages(self) -> Mapping[int, Sequence[ProcessFacts]]:
        found: dict[int, list[ProcessFacts]] = {}
        for rank in sorted(self.by_rank):
            found.setdefault(rank.pp, []).append(self.by_rank[rank])
        return found

    def check_ranks(self) -> None:
        """Checks that a process occupies every logical rank.

        Raises:
            InconsistentFactsError: a rank has none.
        """
        if len(self.by_rank) < self.layout.num_ranks:
            vacant = min(set(self.layout.ranks).difference(self.by_rank))
            raise InconsistentFactsError(f"no process has {vacant}")
