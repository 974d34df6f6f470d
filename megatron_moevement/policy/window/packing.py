# SPDX-License-Identifier: Apache-2.0
"""Packing: spreads operators over the slots of a window so that the largest slot is smallest.

A slot of a rank weighs the FULL bytes of its operators and the COMPUTE bytes of those in later
slots. Each operator lies on one rank or on several, with a share of its own on each, and has one
slot on all of them. Minimising the largest slot of the worst rank is multiprocessor scheduling
with vectors, hence NP-hard. Two packings are made, and each component of ranks that share
operators takes one of them:

- *Ordered.* For a bound B, operators of the same ranks are taken from the end of their order and
  put into the last slot until one of their ranks would exceed B, then into the slot before, and so
  on; operators of many ranks go first. Bisection finds the smallest B that this reaches.
  When every operator weighs the same on each of its ranks, and the ranks of any two operators are
  nested or disjoint, the worst slot exceeds the lower bound below by at most the largest operator
  (COMPUTE bytes being one fixed part of FULL bytes), so it is less than twice the optimum.
- *By size.* The largest operator first, each into the slot where the worst of its ranks ends up
  smallest (Graham's longest processing time first).

Operators keep their order unless packing by size is more than `ORDER_TOLERANCE` better, or keeps a
budget that the ordered one breaks; even then operators of equal bytes on equal ranks keep
theirs. Every packing carries its lower bound, so its distance from the optimum is known.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Sequence
from enum import Enum
from itertools import pairwise

from megatron_moevement.policy.window.components import Component, Group, OrderedColumn

ORDER_TOLERANCE = 0.05
"""How much smaller, relatively, the worst slot must get for the packing to break the order."""


class Levelled(Enum):
    """Which bytes are spread evenly over the slots.

    FULL_AND_COMPUTE makes the largest slot smallest: later slots, with less COMPUTE in them, get
    more operators. FULL gives every slot the same FULL bytes, as Algorithm 1 gives every slot the
    same number of operators: with equal operators slot j weighs 12 / W + 2 (W - j - 1) / W bytes a
    parameter.
    """

    FULL_AND_COMPUTE = "full-and-compute"
    FULL = "full"


@dataclasses.dataclass(frozen=True)
class Packing:
    """A slot for every item of a component.

    Attributes:
        slots: for each group the slots of its items.
        worst_slot_bytes: the largest slot of the worst rank, COMPUTE included.
        lower_bound_bytes: no packing has a smaller worst slot.
    """

    slots: list[list[int]]
    worst_slot_bytes: int
    lower_bound_bytes: int


Loads = dict[int, list[int]]
"""Bytes of every slot of every rank."""


def lower_bound_bytes(component: Component, window: int, levelled: Levelled) -> int:
    """Returns bytes that the levelled part of the worst slot can't stay below.

    With COMPUTE p times FULL, and G_j the FULL bytes of slot j and later, a largest slot B allows
    G_j <= B + (1 - p) G_(j+1), hence G_0 <= B (1 - (1 - p)^W) / p.
    """
    bound = float(component.largest_bytes)
    for full, part in component.totals:
        p = part if levelled is Levelled.FULL_AND_COMPUTE else 0.0
        share = p / -math.expm1(window * math.log1p(-p)) if 0 < p < 1 else max(p, 1 / window)
        bound = max(bound, full * share)
    return math.ceil(bound * (1 - 1e-9))


def pack(
    component: Component,
    window: int,
    levelled: Levelled = Levelled.FULL_AND_COMPUTE,
    budget_bytes: int | None = None,
) -> Packing:
    """Gives every item of a component its slot in a window.

    Args:
        budget_bytes: what a slot should not exceed, if known: the order is kept while it does not.
    """
    bound = lower_bound_bytes(component, window, Levelled.FULL_AND_COMPUTE)
    cuts = _pack_ordered(component, window, levelled)
    ordered = Packing(_uncut(cuts), _worst_of_cuts(component, window, cuts), bound)
    within_budget = budget_bytes is None or ordered.worst_slot_bytes <= budget_bytes
    if within_budget and ordered.worst_slot_bytes <= bound * (1 + ORDER_TOLERANCE):
        return ordered
    slots = _pack_by_size(component, window, levelled)
    by_size = Packing(slots, _worst_of_slots(component, window, slots), bound)
    clearly_smaller = by_size.worst_slot_bytes * (1 + ORDER_TOLERANCE) < ordered.worst_slot_bytes
    saves_budget = budget_bytes is not None and (
        by_size.worst_slot_bytes <= budget_bytes < ordered.worst_slot_bytes
    )
    return by_size if clearly_smaller or saves_budget else ordered


def _worst_of_cuts(component: Component, window: int, cuts: Sequence[Sequence[int]]) -> int:
    """Returns the largest slot of the worst rank of a packing that keeps the order."""
    full: Loads = {rank: [0] * window for rank in component.columns_by_rank}
    compute: Loads = {rank: [0] * window for rank in component.columns_by_rank}
    for group, cut in zip(component.groups, cuts, strict=True):
        for column in group.columns:
            full_sums, compute_sums = column.full_sums, column.compute_sums
            full_bytes, compute_bytes = full[column.rank], compute[column.rank]
            for slot, (start, end) in enumerate(pairwise(cut)):
                full_bytes[slot] += full_sums[end] - full_sums[start]
                compute_bytes[slot] += compute_sums[end] - compute_sums[start]
    return _worst(full, compute, window)


def _worst_of_slots(component: Component, window: int, slots: Sequence[Sequence[int]]) -> int:
    """Returns the largest slot of the worst rank of any packing."""
    full: Loads = {rank: [0] * window for rank in component.columns_by_rank}
    compute: Loads = {rank: [0] * window for rank in component.columns_by_rank}
    for group, chosen in zip(component.groups, slots, strict=True):
        for column in group.columns:
            full_bytes, compute_bytes = full[column.rank], compute[column.rank]
            for slot, large, small in zip(chosen, column.full, column.compute, strict=True):
                full_bytes[slot] += large
                compute_bytes[slot] += small
    return _worst(full, compute, window)


def _worst(full: Loads, compute: Loads, window: int) -> int:
    """Returns the largest slot, which is the FULL in it and the COMPUTE in those after it."""
    worst = 0
    for rank, full_bytes in full.items():
        later = 0
        for slot in reversed(range(window)):
            worst = max(worst, full_bytes[slot] + later)
            later += compute[rank][slot]
    return worst


def _pack_ordered(component: Component, window: int, levelled: Levelled) -> list[list[int]]:
    """Returns where each group is cut into slots for the smallest bound that keeps the order."""
    low = lower_bound_bytes(component, window, levelled)
    best = _cut_groups(component, window, levelled, low)
    if best is None:
        step = max(component.largest_bytes, 1)
        while (best := _cut_groups(component, window, levelled, low + step)) is None:
            step *= 2
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            cuts = _cut_groups(component, window, levelled, middle)
            if cuts is None:
                low = middle
            else:
                best, high = cuts, middle
    return best


def _uncut(cuts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the slot of each item of groups that are cut into slots."""
    slots: list[list[int]] = []
    for cut in cuts:
        slots.append([])
        for slot, (start, end) in enumerate(pairwise(cut)):
            slots[-1] += [slot] * (end - start)
    return slots


def _cut_groups(
    component: Component, window: int, levelled: Levelled, bound_bytes: int
) -> list[list[int]] | None:
    """Returns where each group is cut into slots when no slot may exceed the bound, if it can be.

    A cut [0, a, b, ..., n] puts items 0 to a - 1 into slot 0, a to b - 1 into slot 1 and so on.
    """
    loads: Loads = {rank: [0] * window for rank in component.columns_by_rank}
    cuts = []
    for group in component.groups:
        columns = [
            (loads[column.rank], column.full_sums, _counted_sums(column, levelled))
            for column in group.columns
        ]
        cut = _cut_group(columns, len(group.positions), window, bound_bytes)
        if cut is None:
            return None
        cuts.append(cut)
    return cuts


def _counted_sums(column: OrderedColumn, levelled: Levelled) -> Sequence[int] | None:
    return column.compute_sums if levelled is Levelled.FULL_AND_COMPUTE else None


def _cut_group(
    columns: Sequence[tuple[list[int], Sequence[int], Sequence[int] | None]],
    num_items: int,
    window: int,
    bound_bytes: int,
) -> list[int] | None:
    """Cuts one group from its end, adds it to the ranks' loads; None when it does not fit.

    Args:
        columns: for each rank its loads, the running sums of FULL bytes, and those of COMPUTE
            bytes where they count.
    """
    cut = [num_items]
    for slot in reversed(range(window)):
        end = cut[-1]
        start = 0
        for load, full, compute in columns:
            if compute is not None:
                load[slot] += compute[num_items] - compute[end]
            free = bound_bytes - load[slot]
            if free < 0:
                return None
            start = max(start, bisect_left(full, full[end] - free))
        for load, full, _ in columns:
            load[slot] += full[end] - full[start]
        cut.append(start)
    return cut[::-1] if cut[-1] == 0 else None


def _pack_by_size(component: Component, window: int, levelled: Levelled) -> list[list[int]]:
    """Returns the slots of each group's items, largest first, each into the smallest slot."""
    counted = levelled is Levelled.FULL_AND_COMPUTE
    loads: Loads = {rank: [0] * window for rank in component.columns_by_rank}
    slots = [[window - 1] * len(group.positions) for group in component.groups]
    places = [
        (-max(sizes), number, place)
        for number, group in enumerate(component.groups)
        if group.columns
        for place, sizes in enumerate(zip(*(column.full for column in group.columns), strict=True))
    ]
    for _, number, place in sorted(places):
        columns = [
            (loads[column.rank], column.full[place], column.compute[place] if counted else 0)
            for column in component.groups[number].columns
        ]
        chosen = _smallest_slot(columns, window)
        slots[number][place] = chosen
        for load, full, compute in columns:
            load[chosen] += full
            if compute:
                for earlier in range(chosen):
                    load[earlier] += compute
    for group, chosen_slots in zip(component.groups, slots, strict=True):
        _restore_order(group, chosen_slots)
    return slots


def _smallest_slot(columns: Sequence[tuple[list[int], int, int]], window: int) -> int:
    """Returns the slot that makes the largest touched slot smallest; the latest of equals."""
    best = window - 1
    best_bytes = None
    for slot in reversed(range(window)):
        worst = 0
        for load, full, compute in columns:
            worst = max(worst, load[slot] + full)
            if compute and slot:
                worst = max(worst, max(load[:slot]) + compute)
        if best_bytes is None or worst < best_bytes:
            best, best_bytes = slot, worst
    return best


def _restore_order(group: Group, slots: list[int]) -> None:
    """Lets items that weigh the same on all ranks exchange slots until they are in order."""
    weights = zip(*(pair for c in group.columns for pair in (c.full, c.compute)), strict=True)
    alike: dict[tuple[int, ...], list[int]] = {}
    for place, weight in enumerate(weights):
        alike.setdefault(weight, []).append(place)
    for places in alike.values():
        for place, slot in zip(places, sorted(slots[place] for place in places), strict=True):
            slots[place] = slot
