# SPDX-License-Identifier: Apache-2.0
"""The window: how many steps a sparse checkpoint takes, and the schedule for that many."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron_moevement.policy.job.operators import Inventory, OperatorId
from megatron_moevement.policy.window.components import Component, split
from megatron_moevement.policy.window.packing import (
    ORDER_TOLERANCE,
    Levelled,
    Packing,
    lower_bound_bytes,
    pack,
)
from megatron_moevement.policy.window.schedule import WindowSchedule

MAX_WINDOW = 64
"""Longest window considered: replay and host memory grow with W."""


@dataclasses.dataclass(frozen=True)
class WindowSize:
    """The W of the job and what it costs.

    Attributes:
        budget_bytes: what a rank can copy in one iteration; None when W was given.
    """

    window: int
    worst_slot_bytes: int
    lower_bound_bytes: int
    budget_bytes: int | None = None

    @property
    def fits(self) -> bool:
        """Whether every slot can be hidden behind an iteration."""
        return self.budget_bytes is None or self.worst_slot_bytes <= self.budget_bytes


@dataclasses.dataclass(frozen=True)
class WindowPlan:
    """A schedule and how its W was found."""

    size: WindowSize
    schedule: WindowSchedule


def plan_window(
    inventory: Inventory,
    order: Sequence[OperatorId],
    *,
    budget_bytes: int | None = None,
    window: int | None = None,
    levelled: Levelled = Levelled.FULL_AND_COMPUTE,
) -> WindowPlan:
    """Chooses W and gives every operator its slot (Algorithm 1, SparseCheckpointSchedule).

    W is the smallest whose worst slot, of all slots and ranks, fits into the budget; one W for the
    job, the largest that a component needs. When none fits, because a rank's COMPUTE alone or one
    operator exceeds the budget, W is the smallest that comes within 5 % of the least stall.
    Algorithm 1 prices slot 0 of equal operators on one rank; all else is as there.

    Args:
        order: all operators, from `order_operators`.
        budget_bytes: what each rank can copy in one iteration, from `slot_budget_bytes`.
        window: W, when it is not to be chosen.

    Raises:
        ValueError: neither or both of `budget_bytes` and `window` are given, W is less than one,
            or the order does not fit the inventory.
    """
    if (budget_bytes is None) == (window is None):
        raise ValueError("give either a budget or a window")
    if window is not None and window < 1:
        raise ValueError(f"a window needs at least one slot, not {window}")
    parts = split(inventory, order)
    packings = _Packings(parts, levelled, budget_bytes)
    if window is None:
        window = packings.smallest_window()
    chosen = [packings.of(part, window) for part in range(len(parts))]
    size = WindowSize(
        window,
        max(packing.worst_slot_bytes for packing in chosen),
        max(packing.lower_bound_bytes for packing in chosen),
        budget_bytes,
    )
    slots = dict(zip(inventory.sorted_operators, _slots(inventory, parts, chosen), strict=True))
    return WindowPlan(size, WindowSchedule(inventory, window, slots))


def _slots(
    inventory: Inventory, parts: Sequence[Component], packings: Sequence[Packing]
) -> list[int]:
    """Returns the slot of each operator, in the inventory's order."""
    slots = [0] * len(inventory.numbers)
    for part, packing in zip(parts, packings, strict=True):
        for group, chosen in zip(part.groups, packing.slots, strict=True):
            for position, slot in zip(group.positions, chosen, strict=True):
                slots[position] = slot
    for item, *others in inventory.tied_positions:
        for position in others:
            slots[position] = slots[item]
    return slots


class _Packings:
    """The components, each packed at most once for each W."""

    def __init__(
        self, parts: Sequence[Component], levelled: Levelled, budget_bytes: int | None
    ) -> None:
        self._parts = parts
        self._levelled = levelled
        self._budget_bytes = budget_bytes
        self._packed: dict[tuple[int, int], Packing] = {}

    def of(self, part: int, window: int) -> Packing:
        """Returns a component's packing into `window` slots."""
        packing = self._packed.get((part, window))
        if packing is None:
            packing = pack(self._parts[part], window, self._levelled, self._budget_bytes)
            self._packed[part, window] = packing
        return packing

    def smallest_window(self) -> int:
        """Returns the smallest W that suits every component (Algorithm 1, FindWindowSize)."""
        window = 1
        for part in range(len(self._parts)):
            window = self._window_of(part, window)
        return window

    def _window_of(self, part: int, first: int) -> int:
        """Returns the smallest W from `first` on that suits a component."""
        assert self._budget_bytes is not None
        component = self._parts[part]
        longest = max(first, min(MAX_WINDOW, component.num_items))
        windows = range(first, longest + 1)
        for window in windows:
            bound = lower_bound_bytes(component, window, Levelled.FULL_AND_COMPUTE)
            if bound > self._budget_bytes:
                continue
            if self.of(part, window).worst_slot_bytes <= self._budget_bytes:
                return window
        least = self.of(part, longest).worst_slot_bytes * (1 + ORDER_TOLERANCE)
        return next(w for w in windows if self.of(part, w).worst_slot_bytes <= least)
