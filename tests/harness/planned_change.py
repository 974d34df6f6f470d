# SPDX-License-Identifier: Apache-2.0
"""When a job of the fault cover changes its window schedule, and when in that it is struck.

Ranks of `punctual_changes` take no longer than they need, so the steps of a change are fixed: rank
0 proposes it behind one step, the others learn of it at the next barrier, and all vote for it at
the barrier after that.
"""

from __future__ import annotations

import dataclasses
from enum import Enum

BY_INDEX = "--moevement-order=index"
"""Keeps the order of experts where it is not what changes."""
_STEPS_TO_AGREE = 2
OTHER_WINDOWS = {2: 3, 3: 4, 4: 2}
"""To which W a job comes that begins with one: a larger one, or a smaller one."""


class Change(Enum):
    """What changes in a job's window schedule."""

    NONE = "none"
    WINDOW = "window"
    """W."""
    ORDER = "order"
    """The order of experts."""


class Moment(Enum):
    """Where in a change of the schedule a step lies."""

    NONE = "none"
    """Nothing changes."""
    UNPROPOSED = "unproposed"
    """The step behind which the change is proposed."""
    PROPOSED = "proposed"
    """Rank 0 alone votes for it, the others learn that there is something to vote for."""
    AGREED = "agreed"
    """All vote for it at the barrier of this step, and adopt it in its commit."""
    EDGE = "edge"
    """The first step that is captured under it."""
    SLOTS = "slots"
    """The step after that one, or the first that begins a window after it."""


@dataclasses.dataclass(frozen=True)
class PlannedChange:
    """A change of the schedule of a job whose windows begin with step 0.

    Attributes:
        change: what changes; something does.
        window: W before it.
        quiet_from: no fault and no restart happens after this step, until the one in the change.
    """

    change: Change
    window: int
    quiet_from: int

    @property
    def new_window(self) -> int:
        """W after it."""
        return OTHER_WINDOWS[self.window] if self.change is Change.WINDOW else self.window

    @property
    def due(self) -> int:
        """The step behind which rank 0 proposes it: one that begins a window.

        Tokens of experts are summed up over all ranks in such a step, so no other order can be
        proposed within a window.
        """
        return (self.quiet_from // self.window + 1) * self.window

    @property
    def agreed(self) -> int:
        """The step in whose commit all adopt it."""
        return self.due + _STEPS_TO_AGREE

    @property
    def edge(self) -> int:
        """The first step that is captured under it, which begins a window of both schedules."""
        return (self.agreed // self.window + 1) * self.window

    def step(self, moment: Moment, *, begins_window: bool) -> int:
        """Returns the step of a moment.

        Args:
            begins_window: whether the step is to begin a window.

        Raises:
            KeyError: nothing changes at that moment.
        """
        return {
            Moment.UNPROPOSED: self.due,
            Moment.PROPOSED: self.due + 1,
            Moment.AGREED: self.agreed,
            Moment.EDGE: self.edge,
            Moment.SLOTS: self.edge + (self.new_window if begins_window else 1),
        }[moment]

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of a job that comes to it, with `punctual_changes`."""
        if self.change is Change.ORDER:
            return ("--moevement-order=hard",)
        sizes = self.window, self.new_window
        return (
            BY_INDEX,
            f"--moevement-schedule-changes={self.due}:{self.new_window}",
            f"--moevement-min-window={min(sizes)}",
            f"--moevement-max-window={max(sizes)}",
        )
