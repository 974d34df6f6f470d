# SPDX-License-Identifier: Apache-2.0
"""Proposals: another schedule, on its way from the rank that makes it to all others."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING

from megatron_moevement.policy.window.ordering import Ordering, order_operators
from megatron_moevement.policy.window.schedule import WindowSchedule
from megatron_moevement.policy.window.timetable import Proposal, due_change, may_propose
from megatron_moevement.policy.window.window_planner import plan_window
from megatron_moevement.testing.world.process import Process
from megatron_moevement.testing.world.scenario import Change

if TYPE_CHECKING:
    from megatron_moevement.testing.world.world import World

TRAVEL_TIME = 6.0


class Proposals:
    """Makes proposals on one rank, off its steps, and brings them to the others."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = random.Random(f"proposals {world.scenario.seed}")  # noqa: S311
        self._known: dict[tuple[int, int], WindowSchedule] = {}

    def look(self, process: Process) -> None:
        """Proposes, on one rank, the schedule that is wanted after the step it has committed."""
        world, step = self._world, process.state.step
        changes = world.scenario.changes
        due = due_change([change.step for change in changes], step)
        if process.rank != world.shape.layout.ranks[0] or due is None:
            return
        wanted, timetable = self._schedule_of(changes[due]), process.timetable
        is_new = wanted.digest != timetable.newest.digest and process.proposed is None
        if is_new and may_propose(timetable, step, step - world.scenario.ring_capacity):
            proposal = Proposal(timetable.newest.schedule_version + 1, wanted.digest)
            world.report(f"{process} proposes schedule {proposal.schedule_version}, {changes[due]}")
            process.proposed = (proposal, wanted)
            for other in world.live:
                if other is not process:
                    delay = TRAVEL_TIME * self._random.random() ** 2
                    told = (other, process.generation, proposal.schedule_version, changes[due])
                    world.clock.after(delay, self._learn, *told)

    def _learn(self, process: Process, generation: int, version: int, change: Change) -> None:
        if process.alive and process.generation == generation:
            order = self._world.policies.order_of(change.order, process.rank)
            schedule = self._schedule_of(dataclasses.replace(change, order=order))
            process.proposed = (Proposal(version, schedule.digest), schedule)

    def _schedule_of(self, change: Change) -> WindowSchedule:
        known = self._known.get((change.window, change.order))
        if known is None:
            inventory = self._world.shape.schedule.inventory
            order = list(order_operators(inventory.operators, Ordering.INDEX))
            if change.order:
                random.Random(change.order).shuffle(order)  # noqa: S311
            known = plan_window(inventory, order, window=change.window).schedule
            self._known[change.window, change.order] = known
        return known
