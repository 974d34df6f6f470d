# SPDX-License-Identifier: Apache-2.0
"""The timetable of a job that has had one schedule since its windows began."""

from __future__ import annotations

from megatron_moevement.policy.window.timetable import Timetable, TimetableEntry, WindowDecision


def one_schedule(
    window: int, version: int = 0, first_step: int = 0, decision: WindowDecision | None = None
) -> Timetable:
    """Returns a timetable with one entry."""
    entry = TimetableEntry(version, first_step, window, f"{window} slots", decision)
    return Timetable((entry,), version)
