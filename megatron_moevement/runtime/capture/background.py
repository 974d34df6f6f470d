# SPDX-License-Identifier: Apache-2.0
"""Background: work that goes on beside the training thread, in the order of its being handed over.

A thread of its own does one piece after the other. What fails there is raised in the thread that
hands over or waits; after a failure nothing more is done.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Generic, TypeVar

from megatron_moevement.runtime.closing import Closing
from megatron_moevement.runtime.interrupts.interrupt_safe_event import InterruptSafeEvent
from megatron_moevement.runtime.priority import lower_priority

T = TypeVar("T")
_SLICE = timedelta(seconds=0.05)
"""Of a wait, in which no interrupt arrives."""


class Background(Closing, Generic[T]):
    """A thread that works; one other thread hands over, waits and closes.

    Once a piece has failed, handing over and waiting raise what `failure` makes of its error.
    """

    _for_slots = False

    def __init__(
        self, name: str, work: Callable[[T], None], failure: Callable[[Exception], Exception]
    ) -> None:
        """Starts the thread.

        Args:
            work: does a piece, on that thread.
            failure: makes what is raised in the other thread of what a piece raised.
        """
        self._work = work
        self._as_failure = failure
        self._pieces: queue.SimpleQueue[tuple[T] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._news = InterruptSafeEvent()
        self.begun = 0
        """Pieces that were handed over."""
        self._done = 0
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    @property
    def backlog(self) -> int:
        """Pieces that were handed over and are not done."""
        return self.begun - self._done

    def hand_over(self, piece: T) -> None:
        """Hands over a piece and returns at once."""
        self.check()
        self.begun += 1
        self._pieces.put((piece,))

    def await_landed(self) -> timedelta:
        """Waits until all is done that was handed over; returns how long it had to."""
        return self.await_that(lambda: self.backlog == 0)

    def await_that(self, holds: Callable[[], bool]) -> timedelta:
        """Waits until something holds that the work changes; returns how long it had to.

        Args:
            holds: looks at what is changed within `changing`.
        """
        started_s = time.perf_counter()
        while not self._is_over(holds):
            self._news.wait(_SLICE)
        self.check()
        return timedelta(seconds=time.perf_counter() - started_s)

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Encloses a change that the other thread waits for; only the working one calls it."""
        with self._lock:
            yield
        self._news.tell()

    def check(self) -> None:
        """Raises what `failure` makes of a failure, if there was one."""
        if self._failure is not None:
            raise self._as_failure(self._failure) from self._failure

    def close(self) -> None:
        """Ends the thread, once all is done that was handed over."""
        self._pieces.put(None)
        self._thread.join()

    def _is_over(self, holds: Callable[[], bool]) -> bool:
        with self._lock:
            return holds() or self._failure is not None

    def _run(self) -> None:
        lower_priority(for_slots=self._for_slots)
        while (piece := self._pieces.get()) is not None:
            if self._failure is None:
                self._do(*piece)
            del piece  # or the last one would be held until another one comes

    def _do(self, piece: T) -> None:
        try:
            self._work(piece)
            with self.changing():
                self._done += 1
        except Exception as error:  # noqa: BLE001  (raised again in the other thread)
            with self.changing():
                self._failure = error
