# SPDX-License-Identifier: Apache-2.0
"""The commit of a step: who may vote for it, and what the barrier tells of windows."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_moevement.policy.copies.persistence import Acknowledgements
from megatron_moevement.policy.copies.slot_ring import SlotRing
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.policy.window.timetable import Timetable


def may_vote(ring: SlotRing, timetable: Timetable, acknowledgements: Acknowledgements) -> bool:
    """Returns whether a rank may come to the barrier, or waits for room for the slot of the step.

    The barrier itself tells that a window is persisted and its predecessor's room is free, so
    a full ring waits in front of it, until the rank's own part of a newer window is complete. All
    rings are equally full, hence all ranks wait for the same window.
    """
    if not ring.is_full(timetable):
        return True
    complete = acknowledgements.newest_complete()
    return complete is not None and complete.start > ring.oldest


def coverage_vote(window_start: int, copies: int) -> tuple[int, int]:
    """Returns what a rank brings to the barrier, where the greatest of each number counts.

    A window is persisted when every logical rank's every slot of it has all its acknowledgements:
    the oldest of the ranks' windows, with the fewest copies that any slot has. No rank may take
    this decision from its own acknowledgements: ranks that drop the previous window at different
    steps leave nothing that all can recover from. Source: section 3.2.

    Args:
        window_start: start of the window that `newest_complete` gave; negative where there is none.
    """
    return -window_start, -copies


def agreed_coverage(greatest: Sequence[int]) -> tuple[int, int]:
    """Returns the start of the newest persisted window, negative where there is none, and copies.

    Args:
        greatest: the greatest of what the ranks brought, number by number.
    """
    window_start, copies = greatest
    return -window_start, -copies


def newest_persisted(former: Window | None, agreed: Window | None) -> Window | None:
    """Returns what a rank believes persisted after a barrier: never less than before.

    A rank that replaces a lost one reports fewer windows until its copies are acknowledged again.
    """
    return max(filter(None, (former, agreed)), default=None)


def is_current(sent_in: int, generation: int) -> bool:
    """Returns whether a message counts: only those of the receiver's own generation do.

    An interrupted rank may have sent garbage, and an acknowledgement may speak of a copy that a
    restart took away.
    """
    return sent_in == generation
