# SPDX-License-Identifier: Apache-2.0
"""Proposals: the next schedule, on its way from the rank that makes it to all others.

What is proposed follows from measurements and counts, by the functions that production calls; when
a proposal is made and comes to others is drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.watching.schedule_maker import ScheduleMaker, room_for_windows
from megatron_moevement.policy.watching.window_choice import Reason, WindowChoice, ends_trial
from megatron_moevement.policy.window.popularity import Popularity
from megatron_moevement.policy.window.slot_room import RankRoom
from megatron_moevement.policy.window.timetable import Proposal, due_change, may_propose
from megatron_moevement.testing.world.process import Process
from megatron_moevement.testing.world.scheduling import Proposed, Wish

if TYPE_CHECKING:
    from megatron_moevement.testing.world.world import World

TRAVEL_TIME = 6.0
SCALARS_BYTES = 1
"""Of every slot, beside the operators."""
ORDER = "order"
"""Why a schedule with the same W is proposed."""
EMPTY = "empty slots"
"""Why a schedule with steps without anything to capture is proposed."""


class Proposals:
    """Makes proposals on one rank, off its steps, and brings them to the others that ask."""

    def __init__(self, world: World) -> None:
        scenario, planned = world.scenario, world.shape.schedule
        self._world = world
        self._random = random.Random(f"proposals {scenario.seed}")  # noqa: S311
        conditions = scenario.conditions
        self._are_any = bool(scenario.changes) or conditions.counts_tokens or conditions.measures
        smallest, largest = scenario.min_window, scenario.max_window
        windows = range(smallest, largest + 1)
        reached = windows if self._are_any else (planned.window,)
        self._maker = ScheduleMaker(
            planned, windows, room_for_windows(planned, reached), conditions.kernels
        )
        sizes = self._maker.sizes() if conditions.measures else {}
        self._slots = {window: size.largest_bytes for window, size in sizes.items()}
        self._made: dict[tuple[int, int], Proposed] = {}

    def room(self, rank: LogicalRank) -> RankRoom:
        """Returns the bytes that there are for the slots of a rank."""
        return self._maker.room[rank].beside(SCALARS_BYTES, self._world.scenario.max_window)

    def after_step(self, process: Process) -> None:
        """Sees to it that what is wanted, or proposed by another rank, comes to all."""
        if not self._are_any:
            return
        own, timetable, step = process.scheduling, process.timetable, process.state.step
        version = timetable.newest.schedule_version + 1
        is_here = own.proposed is not None and own.proposed.proposal.schedule_version == version
        if is_here or not may_propose(timetable, step, step - self._world.scenario.ring_capacity):
            own.noted = None
        elif process.rank == self._world.shape.layout.ranks[0]:
            self._propose(process, version)
        elif own.announced == version and not own.is_busy:
            own.is_busy = True
            self._later(self._learn, process, process.generation, version)

    def _propose(self, process: Process, version: int) -> None:
        own, newest = process.scheduling, process.timetable.newest
        fixed = newest.window
        if not self._world.scenario.conditions.measures:
            wanted = ((0, self._world.shape.schedule.window), *self._wanted_changes())
            due = due_change([step for step, _ in wanted], process.state.step)
            assert due is not None
            fixed = wanted[due][1]
        wish = Wish(fixed, own.known.ordered_by, newest.digest)
        if (wish != own.settled or own.noted is not None) and not own.is_busy:
            own.is_busy = True
            self._later(self._make, process, process.generation, version, wish, own.known)

    def _wanted_changes(self) -> tuple[tuple[int, int], ...]:
        return tuple((change.step, change.window) for change in self._world.scenario.changes)

    def _make(
        self, process: Process, generation: int, version: int, wish: Wish, known: Popularity
    ) -> None:
        if not process.alive or process.generation != generation:
            return
        own, newest = process.scheduling, process.timetable.newest
        own.is_busy = False
        window, in_force = wish.window, self._used(process)
        window, used = self._chosen(process, window, in_force)
        decision = newest.decision if own.choice is None else own.choice.decision
        former = process.schedule(newest)
        schedule = self._maker.wanted(window, known, used, after=former)
        if not self._maker.may_follow(schedule, former):
            if not ends_trial(newest.decision, decision):
                own.settled = wish
                return
            schedule = former
        own.proposed = Proposed(Proposal(version, schedule.digest, decision), schedule)
        self._made[generation, version] = own.proposed
        self._world.report(f"{process} proposes schedule {version}, W = {window}")
        if schedule is not former and window == newest.window and used == in_force:
            self._world.outcome.reasons.add(ORDER)

    def _used(self, process: Process) -> int | None:
        """Returns how many slots hold anything; None where as many as W has use for."""
        newest, measures = process.timetable.newest, self._world.scenario.conditions.measures
        return self._maker.used_of(process.schedule(newest)) if measures else None

    def _chosen(self, process: Process, window: int, used: int | None) -> tuple[int, int | None]:
        """Returns the W that is to follow by what the worst rank has measured, and used slots."""
        own = process.scheduling
        noted, own.noted = own.noted, None
        if noted is None:
            return window, used
        self._world.invariants.schedules.chooses(process, noted)
        former = WindowChoice.under(window, used, own.choice, process.timetable.newest.decision)
        if not former.is_under_way(window, used):
            former = former.after(noted.measured, self._slots, len(process.holders))
        own.choice = choice = former
        if choice.reason is not Reason.FITS:
            self._world.outcome.reasons.add(choice.reason.value)
        if choice.used is not None:
            self._world.outcome.reasons.add(EMPTY)
        return choice.window, choice.used

    def _learn(self, process: Process, generation: int, version: int) -> None:
        if process.alive and process.generation == generation:
            process.scheduling.is_busy = False
            process.scheduling.proposed = self._made[generation, version]

    def _later(self, action: Callable[..., None], *arguments: Any) -> None:
        delay = TRAVEL_TIME * self._random.random() ** 2
        self._world.clock.after(delay, action, *arguments)
