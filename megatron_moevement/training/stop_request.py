"""When a job should end early: a signal, or the time it was given."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from types import FrameType

from megatron_moevement.runtime.commit_barrier import StopRequest


class StopSources:
    """What this process knows of reasons to stop; asked once per step by the training thread."""

    def __init__(self, duration: timedelta | None) -> None:
        """Starts the clock of `--exit-duration-in-mins`."""
        self._deadline_s = None if duration is None else time.monotonic() + duration.total_seconds()
        self._signalled = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Takes SIGTERM as a request to save and exit, until the block ends."""
        previous = signal.signal(signal.SIGTERM, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._signalled = True

    def request(self) -> StopRequest:
        """Returns what this process wants; the commit barrier makes it the whole job's wish."""
        if self._signalled:
            return StopRequest.SIGNAL
        if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
            return StopRequest.DURATION
        return StopRequest.NONE
