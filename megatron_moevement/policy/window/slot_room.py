# SPDX-License-Identifier: Apache-2.0
"""The room of a rank for what it captures, by how many slots of a window hold anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


def least_after(used_slots: int) -> int:
    """Returns the fewest slots that a window may use after one that used so many: half of them.

    With fewer, a ring would need room for large slots behind two windows of many small ones.
    """
    return -(-used_slots // 2)


class SlotRoom(NamedTuple):
    """The room for the windows of one W.

    Attributes:
        slot_bytes: of a slot.
        window_bytes: of all slots of a window.
    """

    slot_bytes: int
    window_bytes: int

    def holds(self, slots: Sequence[int]) -> bool:
        """Returns whether there is room for slots of so many bytes, those of one window."""
        return max(slots) <= self.slot_bytes and sum(slots) <= self.window_bytes


@dataclasses.dataclass(frozen=True)
class RankRoom:
    """The room of one rank.

    Attributes:
        by_used: for each number of slots that hold anything, all between the smallest and the
            largest W.
    """

    by_used: Mapping[int, SlotRoom]

    def document(self) -> list[list[int]]:
        """Returns it as JSON has it."""
        return [[used, *room] for used, room in self.by_used.items()]

    @classmethod
    def of_document(cls, document: Iterable[Sequence[int]]) -> RankRoom:
        """Returns the room of a document."""
        return cls({used: SlotRoom(*room) for used, *room in document})

    @property
    def slot_bytes(self) -> int:
        """Of the largest slot."""
        return max(room.slot_bytes for room in self.by_used.values())

    def of(self, used_slots: int) -> SlotRoom | None:
        """Returns the room for windows that use so many slots; None: for so many there is none."""
        return self.by_used.get(max(used_slots, min(self.by_used)))

    def beside(self, extra_bytes: int, window: int) -> RankRoom:
        """Returns the room where every slot has so many bytes more, the empty ones, too.

        Args:
            window: the largest W.
        """
        return RankRoom(
            {
                used: SlotRoom(
                    room.slot_bytes + extra_bytes, room.window_bytes + window * extra_bytes
                )
                for used, room in self.by_used.items()
            }
        )
