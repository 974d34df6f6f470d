# SPDX-License-Identifier: Apache-2.0
"""When a job should end early: a signal, or the time it was given."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING

from megatron_moevement.runtime.coordination.commit_barrier import StopRequest
from megatron_moevement.training.received_signals import ReceivedSignals

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_POLL_S = 0.01
_AGAIN_S = 0.02
"""Until an interrupt that was dropped comes again: what dropped it is short."""


class StopSources:
    """What this process knows of reasons to stop; asked once per step by the training thread."""

    def __init__(self, duration: timedelta | None) -> None:
        """Starts the clock of `--exit-duration-in-mins`."""
        self._deadline_s = None if duration is None else time.monotonic() + duration.total_seconds()
        self._received = ReceivedSignals()
        self._is_raised = False

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C was pressed: whatever this process keeps for a relaunch is to go."""
        return signal.SIGINT in self._received

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Takes SIGTERM as a request to save and exit, until the block ends, and SIGINT as Ctrl-C.

        The first Ctrl-C raises KeyboardInterrupt. The next one would interrupt what cleans up.
        Where the interpreter drops the exception, as it does in a finalizer of garbage, it is
        raised again: a process that waits for others may never ask for requests.
        """
        with self._received.noted(), self._handled():
            yield

    @contextlib.contextmanager
    def _handled(self) -> Iterator[None]:
        previous = signal.signal(signal.SIGTERM, _go_on)
        previous_interrupt = signal.signal(signal.SIGINT, self._interrupt)
        previous_hook = sys.unraisablehook

        def raise_again(dropped: UnraisableHookArgs) -> None:
            if dropped.exc_type is KeyboardInterrupt and self.interrupted:
                self._is_raised = False
                threading.Thread(target=_interrupt_again, daemon=True).start()
            else:
                previous_hook(dropped)

        sys.unraisablehook = raise_again
        try:
            yield
        finally:
            sys.unraisablehook = previous_hook
            signal.signal(signal.SIGINT, previous_interrupt)
            signal.signal(signal.SIGTERM, previous)

    def check(self) -> None:
        """Raises KeyboardInterrupt where Ctrl-C was pressed, whatever has become of the first one.

        What restarts a process raises another exception, which may take its place on its way up.
        """
        if self.interrupted:
            self._is_raised = True
            raise KeyboardInterrupt

    def only_note(self) -> None:
        """From now on Ctrl-C is noted, and raises nothing."""
        self._is_raised = True

    def clean_up(self, work: Callable[[], None]) -> None:
        """Does what is left to do after an interrupt, and has it disturbed by nothing.

        It works in a thread of its own. Exceptions that others raise in the main thread, as the
        monitor of a restart does, may come as late as now: they are dropped.
        """
        self.only_note()
        begun, is_done = threading.Lock(), threading.Event()

        def clean() -> None:
            if begun.acquire(blocking=False):
                try:
                    work()
                finally:
                    is_done.set()

        while not is_done.is_set():
            with contextlib.suppress(BaseException):
                if not begun.locked():
                    threading.Thread(target=clean, name="clean-up").start()
                time.sleep(_POLL_S)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if not self._is_raised:
            self._is_raised = True
            raise KeyboardInterrupt

    def request(self) -> StopRequest:
        """Returns what this process wants; the commit barrier makes it the whole job's wish.

        Where the KeyboardInterrupt was dropped the wish to stop is still there.
        """
        if signal.SIGTERM in self._received or self.interrupted:
            return StopRequest.SIGNAL
        if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
            return StopRequest.DURATION
        return StopRequest.NONE


def _go_on(number: int, frame: FrameType | None) -> None:
    """Does nothing: a signal with a handler in Python is noted."""
    del number, frame


def _interrupt_again() -> None:
    time.sleep(_AGAIN_S)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
