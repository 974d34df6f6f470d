# SPDX-License-Identifier: Apache-2.0
"""What a process must remember of its place in the run."""

from __future__ import annotations

import dataclasses

from megatron_moevement.policy.document import Document
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.policy.window.timetable import Timetable


@dataclasses.dataclass(frozen=True)
class JournalState(Document):
    """What the journal of a process says of its place in the run.

    Attributes:
        rollbacks: how many rollbacks to a durable checkpoint lie behind it.
        timetable: the window schedules that the job has agreed on.
        committed: k, the newest step that it committed.
        persisted: the newest window that it knows to be persisted.
        rank: the logical rank that it occupies; None for a spare.
    """

    rollbacks: int
    timetable: Timetable
    committed: int
    persisted: Window | None
    rank: LogicalRank | None
