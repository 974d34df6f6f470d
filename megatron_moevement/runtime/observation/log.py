# SPDX-License-Identifier: Apache-2.0
"""The log of a program: lines, each with time, host, rank and level; of records on standard error.

A module writes to `logging.getLogger(__name__)` and sets nothing up; a program opens the log. Where
another program uses this package, what becomes of the records is that program's concern.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import time
from collections.abc import Iterator

from megatron_moevement.runtime.observation.timestamp import timestamp

PACKAGE = "megatron_moevement"
_LEVELS = (logging.INFO, logging.WARNING, logging.ERROR)


class Log(logging.Handler):
    """Writes the records of this package to standard error.

    Attributes:
        place: who this process is in its job, such as `rank 3`; it may change.
    """

    def __init__(self, program: str, place: str) -> None:
        """Begins with a place.

        Args:
            program: the name of what runs, at the beginning of each text.
        """
        super().__init__()
        self.place = place
        self._program = program
        self._host = socket.gethostname()

    def createLock(self) -> None:  # noqa: N802  (logging's name)
        """Makes none: a thread that a restart interrupts would keep it, and all others would wait.

        A record is one call of the stream, so that lines of several threads do not mix.
        """
        self.lock = None

    def format(self, record: logging.LogRecord) -> str:
        """Returns the lines of a record; each begins like the first."""
        return self.lines(super().format(record), record.created, record.levelname)

    def lines(self, text: str, time_s: float, level: str) -> str:
        """Returns the lines of a text, each with its end and what the log has before it.

        Args:
            text: of one line or several.
            time_s: seconds since the epoch.
            level: its name.
        """
        prefix = f"{timestamp(time_s)} {self._host} {self.place} {level} {self._program}: "
        return "".join(f"{prefix}{line}\n" for line in text.splitlines())

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record at once."""
        try:
            sys.stderr.write(self.format(record))
            sys.stderr.flush()
        except (OSError, TypeError, ValueError):  # a stream that is gone, or a wrong format
            self.handleError(record)

    def show(self, level: int) -> None:
        """Has records of a level, and of those above it, written.

        Args:
            level: as in `logging`, from 10 (debug) to 50.
        """
        package = logging.getLogger(PACKAGE)
        package.setLevel(level)
        for name in list(logging.Logger.manager.loggerDict):
            if name.partition(".")[0] == PACKAGE:
                own = logging.getLogger(name)
                for each in _LEVELS:
                    own.isEnabledFor(each)  # asks under a lock, once; see `createLock`


def lines_for_output(text: str) -> str:
    """Returns the lines of a text for standard output, as the open log would have them.

    Without one, where another program uses this package, they are as they are.
    """
    for handler in logging.getLogger(PACKAGE).handlers:
        if isinstance(handler, Log):
            return handler.lines(text, time.time(), logging.getLevelName(logging.INFO))
    return f"{text}\n"


@contextlib.contextmanager
def open_log(program: str, place: str, level: int = logging.INFO) -> Iterator[Log]:
    """Yields the log of this process, while which all records of this package go there alone.

    Args:
        program: the name of what runs.
        place: who this process is in its job.
        level: the least level that is written.
    """
    package = logging.getLogger(PACKAGE)
    former = (package.propagate, package.level)
    log = Log(program, place)
    package.addHandler(log)
    package.propagate = False
    log.show(level)
    try:
        yield log
    finally:
        package.removeHandler(log)
        package.propagate = former[0]
        package.setLevel(former[1])
