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

    def __init__(self, faults: Iterable[Fault] = (), process: int = 0) -> None:
        """Arms the faults that strike a process; without any, nothing ever happens."""
        self._armed = frozenset((one.step, one.place) for one in faults if one.strikes(process))

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
