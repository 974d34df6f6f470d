# SPDX-License-Identifier: Apache-2.0
"""The window schedule: in which slot of the window each operator is FULL, for the whole job."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import sys
from array import array
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from megatron_moevement.errors import MoEvementError
from megatron_moevement.policy.job.operators import Inventory, OperatorId
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.packing import ORDER_TOLERANCE
from megatron_moevement.policy.window.slot_room import RankRoom, SlotRoom


def slot_bytes(parts: Iterable[tuple[int, int, int]], window: int) -> tuple[int, ...]:
    """Prices every slot of one rank's window.

    Args:
        parts: for each operator of the rank its slot, its FULL bytes and its COMPUTE bytes.

    Returns:
        For each slot, the FULL bytes of its operators and the COMPUTE bytes of those after it.
    """
    full = [0] * window
    compute = [0] * window
    for slot, full_bytes, compute_bytes in parts:
        full[slot] += full_bytes
        compute[slot] += compute_bytes
    priced = []
    later = 0
    for slot in reversed(range(window)):
        priced.append(full[slot] + later)
        later += compute[slot]
    return tuple(reversed(priced))


def room_of(schedules: Iterable[WindowSchedule]) -> Mapping[LogicalRank, RankRoom]:
    """Returns the room of each rank for the slots of some schedules.

    A window counts as if all of its slots were as large as its largest. Another order of operators
    has other slots. Where there is one schedule, none of them may be larger; where there are
    several, slots lie one behind the other, and one may be larger where others are smaller; where
    W = 1, there is no order.

    Args:
        schedules: of one inventory, one at least; if several, for W that follow each other.
    """
    by_window = sorted(schedules, key=lambda schedule: -schedule.window)
    tolerance = ORDER_TOLERANCE if len(by_window) > 1 else 0
    shares = [1 + tolerance * (each.window > 1) for each in by_window]
    found = [each.bytes_by_slot for each in by_window]
    made: dict[tuple[int, ...], RankRoom] = {}  # who capture alike have one tuple of bytes
    room = {}
    for rank in found[0]:
        alike = tuple(id(slots[rank]) for slots in found)
        if alike not in made:
            largest = accumulate((max(slots[rank]) for slots in found), max)
            made[alike] = RankRoom(
                {
                    each.window: SlotRoom(math.ceil(share * size), each.window * size)
                    for each, share, size in zip(by_window, shares, largest, strict=True)
                }
            )
        room[rank] = made[alike]
    return room


class InvalidScheduleError(MoEvementError, ValueError):
    """A schedule breaks an invariant of windows: recovery from such a window would be wrong."""


class Window(NamedTuple):
    """One sparse checkpoint: the W sparse snapshots of S_start ... S_(start + size - 1).

    Attributes:
        start: the step whose committed state slot 0 captures.
        size: W.
        schedule_version: of the schedule that it was captured under.
    """

    start: int
    size: int
    schedule_version: int = 0

    @property
    def document(self) -> dict[str, int]:
        """The window as files and messages have it; `epoch` is the schedule's version there."""
        return {"start": self.start, "size": self.size, "epoch": self.schedule_version}

    @property
    def last(self) -> int:
        """The step of the last slot: where replay has made every operator dense."""
        return self.start + self.size - 1

    def step_of(self, slot: int) -> int:
        """Returns k such that slot `slot` captures S_k."""
        return self.start + slot


@dataclasses.dataclass(frozen=True)
class WindowSchedule:
    """Which operators each sparse snapshot of a window captures as FULL and which as COMPUTE.

    One schedule holds for every rank of the job, from a window edge until another one is adopted at
    a later one (`Timetable`). There is one slot for each operator, not one for each rank and
    operator: a frozen replica would contribute no gradient to a replica that is active.

    Attributes:
        slots: for each operator the slot in which it is FULL, `0 <= slot < window`.

    Raises:
        InvalidScheduleError: an operator is FULL in no slot or in one outside of the window, or
            tied operators are FULL in different ones.
    """

    inventory: Inventory
    window: int
    slots: Mapping[OperatorId, int]

    def __post_init__(self) -> None:
        if self.window < 1:
            raise InvalidScheduleError(f"a window needs at least one slot, not {self.window}")
        if not self._in_order and self.slots.keys() != self.inventory.operators:
            odd = sorted(self.slots.keys() ^ self.inventory.operators)
            raise InvalidScheduleError(
                f"{odd[0]} ({len(odd)} in all) is in only one of schedule and inventory"
            )
        if min(self.slots.values()) < 0 or max(self.slots.values()) >= self.window:
            operator = next(op for op, slot in self.slots.items() if slot not in range(self.window))
            raise InvalidScheduleError(
                f"{operator} is FULL in slot {self.slots[operator]} of a window of {self.window}"
            )
        for tied in self.inventory.tied:
            if len({self.slots[operator] for operator in tied}) > 1:
                names = ", ".join(f"{op} in slot {self.slots[op]}" for op in sorted(tied))
                raise InvalidScheduleError(f"tied operators need one slot: {names}")

    @cached_property
    def _in_order(self) -> bool:
        """Whether `slots` has the operators as the inventory sorts them; needs no hash."""
        return tuple(self.slots) == self.inventory.sorted_operators

    @cached_property
    def full(self) -> tuple[frozenset[OperatorId], ...]:
        """For each slot the operators that it holds as FULL."""
        members: list[list[OperatorId]] = [[] for _ in range(self.window)]
        for operator, slot in self.slots.items():
            members[slot].append(operator)
        return tuple(map(frozenset, members))

    @cached_property
    def compute(self) -> tuple[frozenset[OperatorId], ...]:
        """For each slot the operators that it holds as COMPUTE: those that are FULL later."""
        later: list[frozenset[OperatorId]] = [frozenset()]
        for full in reversed(self.full[1:]):
            later.append(later[-1] | full)
        return tuple(reversed(later))

    @cached_property
    def bytes_by_slot(self) -> Mapping[LogicalRank, tuple[int, ...]]:
        """For each logical rank the bytes that it captures in each slot."""
        priced = {
            key: slot_bytes(
                ((self.slots[op.id], op.full_bytes, op.compute_bytes) for op in operators),
                self.window,
            )
            for key, operators in self.inventory.distinct.items()
        }
        return {rank: priced[id(own)] for rank, own in self.inventory.by_rank.items()}

    @cached_property
    def worst_slot_bytes(self) -> int:
        """Bytes of the largest slot of the worst rank: what one iteration has to hide."""
        return max(max(slots) for slots in self.bytes_by_slot.values())

    @cached_property
    def used_slots(self) -> int:
        """How many slots hold anything; those after them have scalars alone."""
        return 1 + max(self.slots.values())

    def lasting(self, window: int) -> WindowSchedule:
        """Returns a schedule with the same slots for a larger W: those that come later are empty.

        So it captures less in as many steps: COMPUTE of fewer operators, and no slot is larger.
        """
        return self if window == self.window else dataclasses.replace(self, window=window)

    def fits_into(self, room: Mapping[LogicalRank, RankRoom]) -> bool:
        """Returns whether each rank has room for its slots."""
        used = self.used_slots
        return all(
            (own := room[rank].of(used)) is not None and own.holds(slots)
            for rank, slots in self.bytes_by_slot.items()
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256, as hex, over what all ranks must agree on before they adopt the schedule."""
        operators = self.inventory.sorted_operators
        numbers = array("Q", (self.window, len(operators)))
        numbers.extend(self.inventory.numbers)
        sorted_slots = map(self.slots.__getitem__, operators)
        numbers.extend(self.slots.values() if self._in_order else sorted_slots)
        if sys.byteorder == "big":
            numbers.byteswap()
        return hashlib.sha256(numbers).hexdigest()
