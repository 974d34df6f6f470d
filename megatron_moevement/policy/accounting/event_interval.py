# SPDX-License-Identifier: Apache-2.0
"""Decides how many steps one event of a process stands for, unless a flag has it."""

from __future__ import annotations

MOST_RANKS_WITH_EVERY_STEP = 64
"""An event has about 560 bytes: with a step a second, 3 GB a day for so many ranks."""

LONGER = 10
"""With 1,024 ranks 5 GB a day. Not more, as watchers see a step that much later: alerts take 15
minutes without a new step for a job that hangs."""


def event_interval(ranks: int) -> int:
    """Returns how many steps one event of a process stands for in a job of so many ranks."""
    return 1 if ranks <= MOST_RANKS_WITH_EVERY_STEP else LONGER
