# SPDX-License-Identifier: Apache-2.0
"""When restarts end: too few processes, too many restarts, or restarts that lead nowhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from nvidia_resiliency_ext.inprocess.exception import RestartAbort
from nvidia_resiliency_ext.inprocess.initialize import Initialize
from nvidia_resiliency_ext.inprocess.state import FrozenState

from megatron_moevement.policy.outcome.futility import RESTARTS_WITHOUT_MEETING, Futility
from megatron_moevement.runtime.coordination.roll_call import LostAtStartError


class StartAgainAbort(RestartAbort):  # type: ignore[misc]  # upstream is not typed
    """The job begins again: a process was lost before its monitor watched it."""


@dataclasses.dataclass(eq=False)
class BoundedRetries(Initialize):  # type: ignore[misc]  # upstream is not typed
    """Stops the job where another restart would not help; called before every generation.

    Attributes:
        futility: returns what the processes found when they met last.
        await_watched: waits until a monitor watches each process of the job.
    """

    active_ranks: int
    max_restarts: int | None
    futility: Callable[[], Futility]
    await_watched: Callable[[], None]
    _known: Futility | None = dataclasses.field(default=None, init=False)
    _alone: int = dataclasses.field(default=0, init=False)

    @property
    def has_begun(self) -> bool:
        """Whether this process was in any generation."""
        return self._known is not None

    def __call__(self, state: FrozenState) -> FrozenState:
        """Passes the state on.

        Raises:
            RestartAbort: the job stops; says why.
            StartAgainAbort: it begins again, without a process that nobody watched.
        """
        try:
            self.await_watched()
        except LostAtStartError as error:
            raise StartAgainAbort(str(error)) from error
        if state.world_size < self.active_ranks or state.active_world_size < self.active_ranks:
            raise RestartAbort(
                f"the job needs {self.active_ranks} processes and has {state.world_size}"
            )
        if self.max_restarts is not None and state.iteration > self.max_restarts:
            raise RestartAbort(f"--inprocess-max-iterations {self.max_restarts} is reached")
        known, self._known = self._known, self.futility()
        if self._known.is_over:  # all have found the same
            raise RestartAbort(f"{self._known.in_vain} restarts in a row led to no new step")
        is_alone = state.active_rank is not None and self._known == known
        self._alone = self._alone + 1 if is_alone else 0
        if self._alone >= RESTARTS_WITHOUT_MEETING:
            raise RestartAbort(f"in {self._alone} restarts in a row the processes never met")
        return state
