"""The commit of a step: who may vote for it, and what it tells of windows and of messages."""

from __future__ import annotations

from megatron_moevement.policy.persistence import Acknowledgements
from megatron_moevement.policy.ring import SlotRing
from megatron_moevement.policy.schedule import Window


def may_vote(ring: SlotRing, acknowledgements: Acknowledgements) -> bool:
    """Returns whether a rank may come to the barrier, or waits for room for the slot of the step.

    The barrier itself tells that a window is persisted and its predecessor's buffers are free, so
    a full ring waits in front of it, until the rank's own part of a newer window is complete. All
    rings are equally full, hence all ranks wait for the same window.
    """
    if not ring.is_full:
        return True
    complete = acknowledgements.newest_complete()
    return complete is not None and complete.start > ring.oldest


def newest_persisted(former: Window | None, agreed: Window | None) -> Window | None:
    """Returns what a rank believes persisted after a barrier: never less than before.

    A rank that replaces a lost one reports fewer windows until its copies are acknowledged again.
    """
    if former is None or agreed is None:
        return former or agreed
    return max(former, agreed)


def is_current(sent_in: int, generation: int) -> bool:
    """Returns whether a message counts: only those of the receiver's own generation do.

    An interrupted rank may have sent garbage, and an acknowledgement may speak of a copy that a
    restart took away.

    Args:
        sent_in: the generation in which the sender sent it.
        generation: the receiver's.
    """
    return sent_in == generation
