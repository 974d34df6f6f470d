"""Fault points: a process passes them on its way through a step, and dies at one when it is told.

What is to be shown of a recovery depends on the instruction at which the processes end, so they end
by SIGKILL: nothing is flushed, no handler runs.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable

from megatron_moevement.settings.faults import Fault, Place

Strike = Callable[[Place], None]
"""Passes a fault point of a step that the caller knows."""


def pass_by(place: Place) -> None:
    """Passes a fault point at which nothing happens."""
    del place


class FaultPoints:
    """The faults of one process; any thread passes fault points."""

    def __init__(self, faults: Iterable[Fault] = (), rank: int = 0) -> None:
        """Arms the faults that strike a process; without any, nothing ever happens.

        Args:
            faults: of the whole job.
            rank: the place that the process occupies.
        """
        self._faults = [one for one in faults if one.strikes(rank)]
        self.enter(generation=0)

    def enter(self, generation: int) -> None:
        """Arms the faults of a generation and no others."""
        self._armed = frozenset(
            (one.step, one.place) for one in self._faults if one.generation == generation
        )

    def strike(self, step: int, place: Place) -> None:
        """Kills the process if a fault is armed for this place of this step."""
        if (step, place) in self._armed:
            sys.stderr.write(f"--moevement-faults: killed at {step}:{place.value}\n")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    def of_step(self, step: int) -> Strike:
        """Returns what passes the fault points of a step."""
        return lambda place: self.strike(step, place)


NO_FAULTS = FaultPoints()
