"""When restarts end: too few processes, too many restarts, or restarts that lead nowhere."""

from __future__ import annotations

from collections.abc import Callable

from nvidia_resiliency_ext.inprocess.exception import RestartAbort
from nvidia_resiliency_ext.inprocess.initialize import Initialize
from nvidia_resiliency_ext.inprocess.state import FrozenState

from megatron_moevement.runtime.roll_call import LostAtStartError

_FUTILE_RESTARTS = 10
"""Restarts that lost no process and committed no step: the next would fail too."""


class StartAgainAbort(RestartAbort):  # type: ignore[misc]  # upstream is not typed
    """The job begins again: a process was lost before its monitor watched it."""


class BoundedRetries(Initialize):  # type: ignore[misc]  # upstream is not typed
    """Stops the job where another restart would not help; called before every generation."""

    def __init__(
        self,
        active_ranks: int,
        max_restarts: int | None,
        committed: Callable[[], int],
        await_watched: Callable[[], None],
    ) -> None:
        """Names the limits.

        Args:
            active_ranks: processes that training needs.
            max_restarts: restarts at the most.
            committed: returns the newest step that this process committed.
            await_watched: waits until a monitor watches each process of the job.
        """
        self._await_watched = await_watched
        self._active_ranks = active_ranks
        self._max_restarts = max_restarts
        self._committed = committed
        self._best = -1
        self._processes = 0
        self._futile = 0

    @property
    def has_begun(self) -> bool:
        """Whether this process was in any generation."""
        return self._best >= 0

    def __call__(self, state: FrozenState) -> FrozenState:
        """Passes the state on.

        Raises:
            RestartAbort: the job stops; says why.
            StartAgainAbort: it begins again, without a process that nobody watched.
        """
        try:
            self._await_watched()
        except LostAtStartError as error:
            raise StartAgainAbort(str(error)) from error
        if state.world_size < self._active_ranks or state.active_world_size < self._active_ranks:
            raise RestartAbort(
                f"{state.world_size} processes are left and {self._active_ranks} are needed"
            )
        if self._max_restarts is not None and state.iteration > self._max_restarts:
            raise RestartAbort(f"--inprocess-max-iterations {self._max_restarts} is reached")
        best = max(self._best, self._committed())
        is_futile = best == self._best and state.world_size == self._processes
        self._futile = self._futile + 1 if is_futile and state.active_rank is not None else 0
        self._best, self._processes = best, state.world_size
        if self._futile >= _FUTILE_RESTARTS:
            raise RestartAbort(f"{self._futile} restarts in a row led to no new step")
        return state
