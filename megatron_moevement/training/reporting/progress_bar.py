# SPDX-License-Identifier: Apache-2.0
"""The progress bar on a terminal; a log file or a pipe never sees it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from megatron_moevement.runtime.observation.log import lines_for_output

_REFRESH_INTERVAL_S = 0.1


class ProgressDisplay:
    """Would show how far the training is, and shows nothing; used by the training thread."""

    def advance_to(self, iteration: int, loss: float) -> None:
        """Shows that an iteration is done, with its loss."""

    def print_line(self, text: str) -> None:
        """Prints text to standard output as the log has it, undisturbed by what is shown."""
        sys.stdout.write(lines_for_output(text))
        sys.stdout.flush()

    def close(self) -> None:
        """Takes away what is shown."""


class ProgressBar(ProgressDisplay):
    """A bar on standard error, drawn by the training thread itself: it owns no thread."""

    def __init__(
        self,
        train_iters: int,
        start: int,
        stream: TextIO,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock_s = clock_s
        self._drawn_at_s = -_REFRESH_INTERVAL_S
        self._progress = Progress(
            TextColumn("iteration"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("lm loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(file=stream),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task("", total=train_iters, completed=start, loss="")
        self._progress.start()

    def advance_to(self, iteration: int, loss: float) -> None:
        """Shows that an iteration is done, with its loss; draws a few times a second at most."""
        self._progress.update(self._task, completed=iteration, loss=f"{loss:.4f}")
        now_s = self._clock_s()
        if now_s - self._drawn_at_s >= _REFRESH_INTERVAL_S:
            self._drawn_at_s = now_s
            self._progress.refresh()

    def print_line(self, text: str) -> None:
        """Prints text to standard output; on a terminal the bar makes room for it."""
        with self._taken_away():
            super().print_line(text)

    def close(self) -> None:
        """Takes the bar away."""
        self._progress.stop()

    @contextmanager
    def _taken_away(self) -> Iterator[None]:
        self._progress.stop()
        try:
            yield
        finally:
            self._progress.start()


def open_progress(train_iters: int, start: int, stream: TextIO = sys.stderr) -> ProgressDisplay:
    """Returns a bar where the stream is a terminal that can draw one, else nothing to see."""
    if not stream.isatty() or Console(file=stream).is_dumb_terminal:
        return ProgressDisplay()
    return ProgressBar(train_iters, start, stream)
