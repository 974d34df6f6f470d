# SPDX-License-Identifier: Apache-2.0
"""The ring of slots: the host buffers that a rank's sparse snapshots go round in."""

from __future__ import annotations

import dataclasses

from megatron_moevement.errors import MoEvementError


class RingFullError(MoEvementError, RuntimeError):
    """A slot was to be captured while no buffer is free: the optimizer has to wait."""


def ring_capacity(window: int, lag: int) -> int:
    """Returns how many slots a ring needs: two windows and the lag of acknowledgement.

    Args:
        lag: steps between the last capture of a window and the step at which it is persisted.

    Raises:
        ValueError: the window is empty or the lag negative.
    """
    if window < 1 or lag < 0:
        raise ValueError(f"no ring for a window of {window} and a lag of {lag}")
    return 2 * window + lag


@dataclasses.dataclass(frozen=True)
class SlotRing:
    """Which steps' slots a ring of preallocated, equally large buffers holds.

    Slots are captured at consecutive steps and dropped from the oldest, so the buffer of S_k is
    k modulo capacity: whoever knows the step knows the place. Buffers are as large as the largest
    slot; levelled slots waste little, and another schedule with the same W fits without
    another allocation.

    Attributes:
        oldest: step of the oldest slot held, `next_step` when it is empty.
        next_step: k such that S_k is captured next.

    Raises:
        ValueError: more slots than buffers, or less than none.
    """

    capacity: int
    oldest: int = 0
    next_step: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.next_step - self.oldest <= self.capacity:
            raise ValueError(
                f"a ring of {self.capacity} can't hold steps {self.oldest} to {self.next_step - 1}"
            )

    @property
    def steps(self) -> range:
        """Steps whose slots are held, ascending."""
        return range(self.oldest, self.next_step)

    @property
    def is_full(self) -> bool:
        """Whether the next capture has to wait; the wait counts as stall."""
        return len(self.steps) == self.capacity

    def captured(self) -> SlotRing:
        """Returns the ring after the capture of S_next_step.

        Raises:
            RingFullError: every buffer holds a slot that is still needed.
        """
        if self.is_full:
            raise RingFullError(f"no free buffer for step {self.next_step}: {self.steps} are held")
        return dataclasses.replace(self, next_step=self.next_step + 1)

    def dropped_before(self, step: int) -> SlotRing:
        """Returns the ring without the slots of S_k, k < step."""
        oldest = min(max(self.oldest, step), self.next_step)
        return dataclasses.replace(self, oldest=oldest)
