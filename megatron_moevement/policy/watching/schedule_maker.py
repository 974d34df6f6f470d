# SPDX-License-Identifier: Apache-2.0
"""The schedules that a job may come to: what follows from a W and from what is known of experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.watching.measurements import Measured, Reduced
from megatron_moevement.policy.window.ordering import Ordering
from megatron_moevement.policy.window.popularity import Popularity
from megatron_moevement.policy.window.schedule import WindowSchedule, room_of
from megatron_moevement.policy.window.skipping_schedule import ExpertOrder, schedule_of
from megatron_moevement.policy.window.slot_room import RankRoom, least_after
from megatron_moevement.policy.window.timetable import Timetable
from megatron_moevement.policy.window.weight_gradients import ExpertKernels


class Noted(NamedTuple):
    """What the worst rank has measured until a step, under the W in force."""

    step: int
    window: int
    measured: Measured


def noted(timetable: Timetable, step: int, greatest: Reduced) -> Noted | None:
    """Returns what a choice of W goes by after the barrier of a step; None of nothing.

    Args:
        timetable: with the schedule that the barrier agreed on, if any.
        greatest: what the barrier found of all ranks' measurements, number by number.
    """
    worst, entry = Measured.worst(greatest), timetable.at(step)
    if worst is None or entry.first_step >= step:  # measured under the schedule before
        return None
    return Noted(step, entry.window, worst)


class SlotSizes(NamedTuple):
    """What the slots of a W take.

    Attributes:
        largest_bytes: of any slot of any rank.
        window_bytes: of all slots of a window, of the rank that captures most.
    """

    largest_bytes: int
    window_bytes: int


def schedule_by_index(planned: WindowSchedule, window: int) -> WindowSchedule:
    """Returns the schedule for a W with experts in the order of their numbers.

    Args:
        planned: that the job began with.
    """
    return planned if window == planned.window else schedule_of(planned.inventory, window)


def room_for_windows(
    planned: WindowSchedule, windows: Iterable[int]
) -> Mapping[LogicalRank, RankRoom]:
    """Returns the room of each rank for any W of some: which one a job begins with decides nothing.

    Largest slots do not always become smaller with W, nor windows larger: where ranks have unlike
    operators, a rank may have its largest slot at a W in between.

    Args:
        planned: that the job begins with; another W maybe in another launch.
        windows: all W that any launch may come to.
    """
    return room_of(schedule_by_index(planned, window) for window in windows)


def slot_sizes(
    planned: WindowSchedule, windows: Iterable[int], room: Mapping[LogicalRank, RankRoom]
) -> Mapping[int, SlotSizes]:
    """Returns what slots take for each W that there is room for; it takes a while.

    Args:
        planned: that the job began with.
        windows: W, as the job may come to it.
        room: of each rank for its slots.
    """
    found = {}
    for window in windows:
        schedule = schedule_by_index(planned, window)
        if schedule is planned or schedule.fits_into(room):
            window_bytes = max(map(sum, schedule.bytes_by_slot.values()))
            found[window] = SlotSizes(schedule.worst_slot_bytes, window_bytes)
    return found


@dataclasses.dataclass(frozen=True)
class ScheduleMaker:
    """Makes schedules, the same wherever it is asked; it takes a while.

    Attributes:
        planned: that the job began with.
        windows: W, as the job may come to it.
        room: of each rank for its slots.
        kernels: that compute experts.
    """

    planned: WindowSchedule
    windows: range
    room: Mapping[LogicalRank, RankRoom]
    kernels: ExpertKernels

    def sizes(self) -> Mapping[int, SlotSizes]:
        """Returns what slots take for each W that there is room for."""
        return slot_sizes(self.planned, self.windows, self.room)

    def by_index(self, window: int) -> WindowSchedule:
        """Returns the schedule for a W with experts in the order of their numbers."""
        return schedule_by_index(self.planned, window)

    def wanted(
        self,
        window: int,
        known: Popularity,
        used: int | None = None,
        *,
        after: WindowSchedule | None = None,
    ) -> WindowSchedule:
        """Returns the schedule for a W and for what is known of the experts.

        Args:
            used: the slots that hold anything; None: as many as W has use for.
            after: that it is to follow; a W that may not is come to in several changes.
        """
        slots = used or window
        if after is not None and slots < least_after(after.used_slots):
            slots = self._least_after(after)
        return self._ordered(slots, known).lasting(max(window, slots))

    def _least_after(self, schedule: WindowSchedule) -> int:
        """Returns the smallest W that may follow a schedule."""
        used, least = schedule.used_slots, least_after(schedule.used_slots)
        smaller = (each for each in range(least, used) if self.by_index(each).used_slots >= least)
        return next(smaller, used)

    def _ordered(self, window: int, known: Popularity) -> WindowSchedule:
        if known.ordering is Ordering.INDEX:
            return self.by_index(window)
        inventory = self.planned.inventory
        scores = known.of_experts(inventory.operators)
        order = ExpertOrder(self.kernels, scores, scores)
        return schedule_of(inventory, window, order, lambda other: other.fits_into(self.room))

    def used_of(self, schedule: WindowSchedule) -> int | None:
        """Returns the slots that hold anything; None where these are as many as W has use for."""
        window, used = schedule.window, schedule.used_slots
        may_be_fewer = window == self.windows[-1] and used in self.windows
        is_fewer = may_be_fewer and used < self.by_index(window).used_slots
        return used if is_fewer else None

    def may_follow(self, schedule: WindowSchedule, newest: WindowSchedule) -> bool:
        """Returns whether a schedule is another one than the newest, and has room behind it."""
        is_other = schedule.digest != newest.digest
        may_be = schedule.used_slots >= least_after(newest.used_slots)
        return is_other and may_be and schedule.fits_into(self.room)
