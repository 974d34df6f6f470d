# SPDX-License-Identifier: Apache-2.0
"""What signals this process has received, whatever became of their handlers.

An exception that another thread raises in the main one, as the monitor of a restart does, may cut
a handler short before its first line. The interpreter's own handler writes the number of a signal
to a file before that, in any state of the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

_MOST = 1 << 16
_NOBODY = -1


class ReceivedSignals:
    """Numbers of signals, of those that have a handler in Python.

    Reading takes nothing away, so an exception in between loses nothing. A forked child notes
    nothing: its signals are not its parent's.
    """

    def __init__(self) -> None:
        self._file = _NOBODY

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Notes signals until the block ends; the main thread calls it.

        Who had asked the interpreter for the same before is not told meanwhile.
        """
        self._file = os.memfd_create("received-signals", os.MFD_CLOEXEC)
        os.set_blocking(self._file, False)
        previous = signal.set_wakeup_fd(self._file, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._forget)
        try:
            yield
        finally:
            signal.set_wakeup_fd(previous)
            os.close(self._file)
            self._file = _NOBODY

    def __contains__(self, number: signal.Signals) -> bool:
        return self._file != _NOBODY and number in os.pread(self._file, _MOST, 0)

    def _forget(self) -> None:
        if self._file != _NOBODY:
            signal.set_wakeup_fd(_NOBODY)
            os.close(self._file)
            self._file = _NOBODY
