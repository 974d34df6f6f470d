# SPDX-License-Identifier: Apache-2.0
"""The ring of slots: the host memory that a rank's sparse snapshots go round in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import product
from typing import NamedTuple

from megatron_moevement.errors import MoEvementError
from megatron_moevement.policy.window.slot_room import RankRoom, least_after
from megatron_moevement.policy.window.timetable import Timetable


class RingFullError(MoEvementError, RuntimeError):
    """A slot was to be captured while no room is free: the optimizer has to wait."""


def ring_capacity(window: int, lag: int) -> int:
    """Returns how many slots a ring needs: two windows and the lag of acknowledgement.

    Args:
        window: the largest W.
        lag: steps between the last capture of a window and the step at which it is persisted.

    Raises:
        ValueError: the window is empty or the lag negative.
    """
    if window < 1 or lag < 0:
        raise ValueError(f"no ring for a window of {window} and a lag of {lag}")
    return 2 * window + lag


def ring_bytes(room: RankRoom, lag: int) -> int:
    """Returns how many bytes a ring needs for slots that lie one behind the other.

    Two windows that may follow each other, the slots of the lag, and what is left at the end, where
    the next slot does not fit: it begins at the start again.
    """
    return max(
        former.window_bytes
        + later.window_bytes
        + lag * behind.slot_bytes
        + max(former.slot_bytes, later.slot_bytes, behind.slot_bytes)
        for (used, former), (then, later) in product(room.by_used.items(), repeat=2)
        if then >= least_after(used) and (behind := room.of(least_after(then))) is not None
    )


class Extent(NamedTuple):
    """Where a slot lies in a ring.

    Attributes:
        offset: of its first byte.
    """

    offset: int
    size_bytes: int

    @property
    def stop(self) -> int:
        """Offset of the byte behind it."""
        return self.offset + self.size_bytes

    def overlaps(self, other: Extent) -> bool:
        """Returns whether two slots have a byte in common."""
        return self.offset < other.stop and other.offset < self.stop


def extent_of(step: int, size_bytes: int, extents: Mapping[int, Extent], room_bytes: int) -> Extent:
    """Returns where the slot of S_step lies: behind the one before it, or at the start of the ring.

    Where there is none before it, it lies in front of the one after it, or at the ring's end.

    Args:
        extents: of the slots that lie there, by their steps.
        room_bytes: of the ring.

    Raises:
        RingFullError: no ring of this size holds it.
    """
    if size_bytes > room_bytes:
        raise RingFullError(f"a slot of {size_bytes} bytes in a ring of {room_bytes}")
    former = max((other for other in extents if other < step), default=None)
    if former is not None:
        start = extents[former].stop
        return Extent(start if start + size_bytes <= room_bytes else 0, size_bytes)
    later = min((other for other in extents if other > step), default=None)
    if later is None:
        return Extent(0, size_bytes)
    start = extents[later].offset - size_bytes
    return Extent(start if start >= 0 else room_bytes - size_bytes, size_bytes)


def place_of(
    step: int, size_bytes: int, lay: Extent | None, extents: Mapping[int, Extent], room_bytes: int
) -> Extent:
    """Returns where the slot of S_step lies that comes out of another ring.

    It lies as it lay there, unless the slots next to it lie otherwise than in that ring: two rings
    have two layouts where a rank's slots were placed again after the loss of all who had them, and
    a process comes back that has them as they lay before. Taken as they lay, slots of both leave
    gaps, or lie in each other's room, and the ring is too small for all.

    Args:
        lay: where it lay; None: where that means nothing in this ring.
        extents: of the slots that stay, by their steps.
        room_bytes: of the ring.

    Raises:
        RingFullError: no ring of this size holds it.
    """
    if lay is not None and _fits(step, lay, extents, room_bytes):
        return lay
    return extent_of(step, size_bytes, extents, room_bytes)


def moved_together(
    copy: Extent, stay: Mapping[int, Extent], room_bytes: int
) -> tuple[Mapping[int, Extent], Extent]:
    """Returns where slots lie that stay in a ring of copies, and where the next copy lies.

    Where all who had a rank's slots were lost and came back, its own ring and one of copies may
    have two layouts: at the place that a copy has in the one lies a slot in the other that its
    owner relies on. Those that stay move to the start of the ring, each towards it or not at all,
    and the copy lies behind them. There is room: all of them lie beside each other in the owner's.

    Args:
        copy: where it lies in its owner's ring.
        stay: where the others lie, by their steps.
        room_bytes: of the ring.

    Returns:
        The others by where they lie, and the place of the copy.

    Raises:
        RingFullError: the ring is too small for all of them.
    """
    moved: dict[int, Extent] = {}
    stop = 0
    for step, there in sorted(stay.items(), key=lambda each: each[1]):
        moved[step] = Extent(stop, there.size_bytes)
        stop = moved[step].stop
    if stop + copy.size_bytes > room_bytes:
        raise RingFullError(f"a slot of {copy.size_bytes} bytes behind {stop} of {room_bytes}")
    return moved, Extent(stop, copy.size_bytes)


def _fits(step: int, lay: Extent, extents: Mapping[int, Extent], room_bytes: int) -> bool:
    """Returns whether a slot lies behind the one before it, or in front of the one after it."""
    if lay.stop > room_bytes or any(lay.overlaps(other) for other in extents.values()):
        return False
    former = max((other for other in extents if other < step), default=None)
    later = min((other for other in extents if other > step), default=None)
    if former is not None and not _is_next(extents[former], lay, room_bytes):
        return False
    if later is None or (former is not None and later > step + 1):
        return True  # what lies between the two is still to come
    return _is_next(lay, extents[later], room_bytes)


def _is_next(former: Extent, later: Extent, room_bytes: int) -> bool:
    """Returns whether one slot lies behind the other, at the ring's ends, too."""
    if former.stop == later.offset:
        return True
    begins_again = later.offset == 0 and former.stop + later.size_bytes > room_bytes
    ends = former.stop == room_bytes and later.offset < former.size_bytes
    return begins_again or ends


@dataclasses.dataclass(frozen=True)
class SlotRing:
    """Which steps' slots a ring holds.

    Slots are captured at consecutive steps and dropped from the oldest. Each lies behind the one
    before it, so a ring whose windows become longer or shorter needs no other memory.

    Attributes:
        capacity: how many slots it has room for, however small they are.
        lag: steps between the last capture of a window and the step at which it is persisted.
        oldest: step of the oldest slot held, `next_step` when it is empty.
        next_step: k such that S_k is captured next.

    Raises:
        ValueError: more slots than there is room for, or less than none.
    """

    capacity: int
    lag: int
    oldest: int = 0
    next_step: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.next_step - self.oldest <= self.capacity:
            raise ValueError(
                f"a ring of {self.capacity} can't hold steps {self.oldest} to {self.next_step - 1}"
            )

    def holding(self, oldest: int, next_step: int) -> SlotRing:
        """Returns the ring with other slots: those from a step on, before another one."""
        return dataclasses.replace(self, oldest=oldest, next_step=next_step)

    @property
    def steps(self) -> range:
        """Steps whose slots are held, ascending."""
        return range(self.oldest, self.next_step)

    def is_full(self, timetable: Timetable) -> bool:
        """Returns whether the next capture has to wait; the wait counts as stall.

        A ring has room for the oldest window that is needed, the one after it, and as many slots
        more as that one's acknowledgements take: all rings are full before the same slot.
        """
        first = timetable.window_of(max(self.oldest, timetable.first_step))
        return self.next_step > timetable.window_of(first.last + 1).last + self.lag

    def captured(self) -> SlotRing:
        """Returns the ring after the capture of S_next_step.

        Raises:
            RingFullError: there is no room for another one.
        """
        if len(self.steps) == self.capacity:
            raise RingFullError(f"no room for step {self.next_step}: {self.steps} are held")
        return dataclasses.replace(self, next_step=self.next_step + 1)

    def dropped_before(self, step: int) -> SlotRing:
        """Returns the ring without the slots of S_k, k < step."""
        oldest = min(max(self.oldest, step), self.next_step)
        return dataclasses.replace(self, oldest=oldest)
