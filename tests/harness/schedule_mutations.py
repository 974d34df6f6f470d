# SPDX-License-Identifier: Apache-2.0
"""Mutations of how a job comes to another window schedule, and of which one reads a window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron_moevement.policy.window.ordering import Ordering, order_operators
from megatron_moevement.policy.window.schedule import Window, WindowSchedule
from megatron_moevement.policy.window.timetable import Proposal, Timetable
from megatron_moevement.policy.window.window_planner import plan_window
from megatron_moevement.strategies.moevement.schedules.exchange import Proposed, ScheduleExchange
from megatron_moevement.strategies.moevement.window_history import WindowHistory

WRONG_RANK = 1
PROPOSED_WINDOW = 5


def adopt_an_edge_early() -> None:
    """Goes by a schedule from an edge before on, on one rank."""
    adopted = Timetable.adopted

    def early(
        self: Timetable, version: int, schedule: WindowSchedule, step: int, *decision: Any
    ) -> Timetable:
        if dist.get_rank() == WRONG_RANK:
            step = max(step - self.newest.window, self.newest.first_step)
        return adopted(self, version, schedule, step, *decision)

    _replace(Timetable, "adopted", early)


def read_by_the_newest_schedule() -> None:
    """Replays every window by the schedule that was agreed on last."""

    def newest(self: WindowHistory, window: Window) -> WindowSchedule:
        del window
        return self.schedules[self.timetable.newest.digest]

    _replace(WindowHistory, "schedule_of", newest)


def order_by_own_counts() -> None:
    """Makes a proposed schedule from an order of its own, on one rank."""
    fetch = ScheduleExchange.fetch

    def made(self: ScheduleExchange, version: int) -> None:
        if dist.get_rank() != WRONG_RANK:
            fetch(self, version)
            return
        inventory = self._inventory
        order = order_operators(inventory.sorted_operators, Ordering.INDEX)
        own = plan_window(inventory, tuple(reversed(order)), window=PROPOSED_WINDOW).schedule
        self.proposed = Proposed(Proposal(version, own.digest), own)

    _replace(ScheduleExchange, "fetch", made)


SCHEDULE_MUTATIONS: dict[str, Callable[[], None]] = {
    one.__name__.replace("_", "-"): one
    for one in (adopt_an_edge_early, read_by_the_newest_schedule, order_by_own_counts)
}
"""By name."""


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    assert hasattr(owner, name), f"{owner} has no {name}: a mutation of nothing shows nothing"
    setattr(owner, name, function)
