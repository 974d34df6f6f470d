# SPDX-License-Identifier: Apache-2.0
"""Window history: which windows a rank has seen persisted, under which schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import Self

from megatron_moevement.integrations.megatron.slot_layout import slot_layouts
from megatron_moevement.integrations.megatron.snapshots import LiveOperators
from megatron_moevement.policy.copies.commit import newest_persisted
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import Window, WindowSchedule
from megatron_moevement.policy.window.schedule_document import encode_schedule
from megatron_moevement.policy.window.timetable import Proposal, Timetable, UnknownScheduleError
from megatron_moevement.runtime.slots.journal import JournalState
from megatron_moevement.strategies.moevement.capture.window_capture import SlotContents


@dataclasses.dataclass(frozen=True)
class WindowHistory:
    """The windows of a history of training, as one rank sees them between two steps.

    Attributes:
        timetable: which schedule is in force when.
        schedules: those of the timetable, by their digests.
        rollbacks: to a durable checkpoint, so far.
        persisted: the newest window that is persisted for the job.
        complete: the newest window that has all copies that this generation is to make.
        step: that this rank committed last; 0 before it has committed any under the schedule.

    Raises:
        UnknownScheduleError: a schedule of the timetable is lacking.
    """

    timetable: Timetable
    schedules: Mapping[str, WindowSchedule]
    rollbacks: int
    persisted: Window | None = None
    complete: Window | None = None
    step: int = 0

    def __post_init__(self) -> None:
        for entry in self.timetable.entries:
            if entry.digest not in self.schedules:
                raise UnknownScheduleError(f"the schedule of {entry} is missing")

    @classmethod
    def begun(cls, schedule: WindowSchedule, step: int, rollbacks: int) -> Self:
        """Returns the history of windows that begin at a step under the job's first schedule."""
        return cls(Timetable.begun(schedule, step), {schedule.digest: schedule}, rollbacks)

    @cached_property
    def encoded(self) -> Mapping[str, bytes]:
        """The schedules as journals and messages have them."""
        return {digest: encode_schedule(one) for digest, one in self.schedules.items()}

    def adopted(
        self, proposal: Proposal, schedule: WindowSchedule, step: int, kept_from: int
    ) -> WindowHistory:
        """Returns what holds once all ranks agreed on another schedule at the barrier of a step.

        Args:
            kept_from: the oldest step of which any slot may still be there.
        """
        version, decision = proposal.schedule_version, proposal.decision
        timetable = self.timetable.adopted(version, schedule, step, decision).known_from(kept_from)
        known = {**self.schedules, schedule.digest: schedule}
        schedules = {digest: known[digest] for digest in timetable.digests()}
        return dataclasses.replace(self, timetable=timetable, schedules=schedules)

    def contents(self, rank: LogicalRank, live: LiveOperators) -> SlotContents:
        """Returns what a rank's slots hold under these schedules."""
        layouts = {
            digest: slot_layouts(schedule, rank, live)
            for digest, schedule in self.schedules.items()
        }
        return SlotContents(self.timetable, layouts, self.rollbacks)

    def schedule_of(self, window: Window) -> WindowSchedule:
        """Returns the schedule that a window was captured under."""
        return self.schedules[self.timetable.of(window).digest]

    def committed(self, step: int, window: Window | None) -> WindowHistory:
        """Returns what holds once a step is committed.

        Args:
            window: the newest that is complete on all ranks, as its barrier found; None: none is.
        """
        return dataclasses.replace(
            self,
            persisted=newest_persisted(self.persisted, window),
            complete=window or self.complete,
            step=step,
        )

    def state(self, committed: int, rank: LogicalRank) -> JournalState:
        """Returns what the journal of a rank says after a step."""
        return JournalState(
            rollbacks=self.rollbacks,
            timetable=self.timetable,
            committed=committed,
            persisted=self.persisted,
            rank=rank,
        )
