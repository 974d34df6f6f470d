# SPDX-License-Identifier: Apache-2.0
"""Retention: what a persisted window makes garbage, and what it still needs."""

from __future__ import annotations

import dataclasses

from megatron_moevement.policy.window.schedule import Window

LAG = 1
"""Steps between the last capture of a window and the one at which it is persisted; where copies
take longer, training waits for them in front of a full ring."""


@dataclasses.dataclass(frozen=True)
class Retention:
    """The oldest of everything that a rank keeps; all that is older may go.

    All ranks derive it from the same persisted window, learnt at the commit barrier of the same
    step, so both ends of a stage boundary drop the same logs. Source: section 3.3, stale log
    cleanup.
    """

    oldest_slot_step: int
    oldest_log_step: int


def retain(persisted: Window | None, first_step: int) -> Retention:
    """Returns what to keep while `persisted` is the newest persisted window.

    Slot 0 of the window holds S_start; replay from it begins with step start + 1. Nothing is
    dropped before a first window is persisted.

    Args:
        first_step: k of the state S_k that the job started from.
    """
    start = first_step if persisted is None else persisted.start
    return Retention(oldest_slot_step=start, oldest_log_step=start + 1)


def max_replayed_steps(window: int, lag: int) -> int:
    """Returns how many steps a recovery replays at most, the redo of the interrupted one apart.

    The worst fault interrupts the step at which the next window would have become persisted.

    Args:
        lag: L, steps between the last capture of a window and the step at which it is persisted.
    """
    return 2 * window - 2 + lag


def largest_window(replayed_steps: int, lag: int) -> int:
    """Returns the largest W of which a recovery replays no more steps than so many, 1 at least."""
    return max((replayed_steps - lag) // 2 + 1, 1)


def max_log_steps(window: int, lag: int) -> int:
    """Returns how many steps' logs a rank keeps at most: those replayed and the one under way.

    With the lag of a full ring these are as many as the ring has slots. A log is dropped with the
    slots, so it has room for as long as the ring has, from whichever window a recovery replays.
    """
    return max_replayed_steps(window, lag) + 1
