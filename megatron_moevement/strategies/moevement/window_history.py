"""Window history: which windows a rank has seen persisted, under which schedule."""

from __future__ import annotations

import dataclasses

from megatron_moevement.policy.copies.commit import newest_persisted
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import Window, WindowSchedule
from megatron_moevement.runtime.slots.journal import JournalState


@dataclasses.dataclass(frozen=True)
class WindowHistory:
    """The windows of a history of training, as one rank sees them between two steps.

    Attributes:
        rollbacks: to a durable checkpoint, so far.
        persisted: the newest window that is persisted for the job.
        complete: the newest window that has all copies that this generation is to make.
        step: that this rank committed last; 0 before it has committed any under the schedule.
    """

    schedule: WindowSchedule
    rollbacks: int
    persisted: Window | None = None
    complete: Window | None = None
    step: int = 0

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
            schedule_version=self.schedule.schedule_version,
            committed=committed,
            persisted=self.persisted,
            rank=rank,
        )
