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
        self.interrupted = False
        """Whether Ctrl-C was pressed: whatever this process keeps for a relaunch is to go."""

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Takes SIGTERM as a request to save and exit, until the block ends, and SIGINT as Ctrl-C.

        The first Ctrl-C raises KeyboardInterrupt. The next one would interrupt what cleans up.
        """
        previous = signal.signal(signal.SIGTERM, self._note)
        previous_interrupt = signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous_interrupt)
            signal.signal(signal.SIGTERM, previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._signalled = True

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt

    def request(self) -> StopRequest:
        """Returns what this process wants; the commit barrier makes it the whole job's wish.

        Where the interpreter dropped the KeyboardInterrupt, as it does in a destructor, the wish
        to stop is still there.
        """
        if self._signalled or self.interrupted:
            return StopRequest.SIGNAL
        if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
            return StopRequest.DURATION
        return StopRequest.NONE
