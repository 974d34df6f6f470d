# SPDX-License-Identifier: Apache-2.0
"""The schedule that skips most: of several orders the one whose replay leaves out most work.

Which order that is depends on the kernels. Where they leave out the weight gradients of each expert
by itself, popular experts come last. Where they leave out those of a layer's local experts at once,
these share a slot where they fit into one, and popular layers come last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping

from megatron_moevement.policy.job.operators import Inventory, OperatorId
from megatron_moevement.policy.window.ordering import Ordering, order_by_layers, order_operators
from megatron_moevement.policy.window.packing import ORDER_TOLERANCE, Levelled
from megatron_moevement.policy.window.schedule import WindowSchedule
from megatron_moevement.policy.window.weight_gradients import (
    ExpertKernels,
    local_experts,
    skipped_gradients,
)
from megatron_moevement.policy.window.window_planner import WindowPlan, plan_window


@dataclasses.dataclass(frozen=True)
class ExpertOrder:
    """What decides the order of experts.

    Attributes:
        scores: that experts are ordered by, ascending; empty: nothing is known of them.
        tokens: of each expert, which decide what its weight gradients take; empty: all as many.
    """

    kernels: ExpertKernels
    scores: Mapping[OperatorId, float] = dataclasses.field(default_factory=dict)
    tokens: Mapping[OperatorId, float] = dataclasses.field(default_factory=dict)


def schedule_of(
    inventory: Inventory,
    window: int,
    order: ExpertOrder | None = None,
    has_room: Callable[[WindowSchedule], bool] = lambda schedule: True,
) -> WindowSchedule:
    """Returns the schedule for W, the same wherever it is made.

    Args:
        order: of experts; None: by index.
        has_room: as of `skip_most`.
    """
    by_index = plan_window(
        inventory, order_operators(inventory.sorted_operators, Ordering.INDEX), window=window
    )
    if order is None:
        return by_index.schedule
    return skip_most(by_index, order, has_room=has_room).schedule


def first_schedule(inventory: Inventory, windows: Iterable[int]) -> WindowSchedule:
    """Returns the schedule for the first W of some that leaves no slot empty, else for the last.

    A model with few operators has no use for a larger one: replays are longer, slots no smaller.

    Args:
        windows: one at least.
    """
    schedules = (schedule_of(inventory, window) for window in windows)
    schedule = next(schedules)
    while not all(schedule.full) and (following := next(schedules, None)) is not None:
        schedule = following
    return schedule


def skip_most(
    by_index: WindowPlan,
    order: ExpertOrder,
    *,
    levelled: Levelled = Levelled.FULL_AND_COMPUTE,
    has_room: Callable[[WindowSchedule], bool] = lambda schedule: True,
) -> WindowPlan:
    """Returns the plan with the same W that leaves out most work in a replay.

    It is the plan by index where no other one leaves out more, or slots of that would be too large:
    for the budget that those by index keep, without one by more than 5 %.

    Args:
        by_index: planned for the order by index.
        has_room: whether there is memory for the slots of another schedule.
    """
    size = by_index.size
    limit = size.worst_slot_bytes * (1 + ORDER_TOLERANCE)
    if size.budget_bytes is not None and size.fits:
        limit = size.budget_bytes
    tokens = order.tokens or None
    best, most = by_index, skipped_gradients(by_index.schedule, order.kernels, tokens).total
    for other in _others(by_index, order, levelled):
        skipped = skipped_gradients(other.schedule, order.kernels, tokens).total
        is_small = other.size.worst_slot_bytes <= limit
        if skipped > most and is_small and has_room(other.schedule):
            best, most = other, skipped
    return best


def _others(by_index: WindowPlan, order: ExpertOrder, levelled: Levelled) -> Iterator[WindowPlan]:
    inventory, window = by_index.schedule.inventory, by_index.size.window

    def planned(alike: Inventory, ordered: tuple[OperatorId, ...]) -> WindowPlan:
        plan = plan_window(alike, ordered, window=window, levelled=levelled)
        size = dataclasses.replace(plan.size, budget_bytes=by_index.size.budget_bytes)
        return WindowPlan(size, dataclasses.replace(plan.schedule, inventory=inventory))

    if order.scores:
        yield planned(inventory, order_operators(inventory.operators, Ordering.HARD, order.scores))
    if order.kernels is ExpertKernels.WHOLE and (together := local_experts(inventory)):
        by_layer = order_by_layers(inventory.operators, together, order.scores)
        yield planned(inventory, by_layer)
        in_one_slot = (*inventory.tied, *map(frozenset, together))
        yield planned(Inventory(inventory.by_rank, in_one_slot), by_layer)
