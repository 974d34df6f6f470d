# SPDX-License-Identifier: Apache-2.0
"""Who is connected to a server: callers that have proved nothing give way to newer ones.

Nobody needs a secret to connect. So connections of callers that have not proved yet who they are
are few, and there is always room for another one: the oldest of the address with the most of them
is ended. Those of proved peers have room of their own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter

from megatron_moevement.runtime.transport.wire import Channel

_LINES = 20
_PERIOD_S = 60.0


class Admission:
    """The connections of one server; any thread may call it."""

    def __init__(self, max_unproven: int, max_proved: int) -> None:
        """Begins with none.

        Args:
            max_unproven: connections at a time of callers that have proved nothing.
        """
        self._max_unproven = max_unproven
        self._max_proved = max_proved
        self._lock = threading.Lock()
        self._unproven: dict[Channel, str] = {}
        self._proved: set[Channel] = set()

    def enter(self, channel: Channel, host: str) -> str | None:
        """Lets a caller in; returns the host of one that was hung up on for it, if any was."""
        with self._lock:
            left = None
            if len(self._unproven) >= self._max_unproven:
                ((most, _),) = Counter(self._unproven.values()).most_common(1)
                oldest = next(one for one, where in self._unproven.items() if where == most)
                left = self._unproven.pop(oldest)
                oldest.hang_up()
            self._unproven[channel] = host
            return left

    def prove(self, channel: Channel) -> bool:
        """Notes that a caller is a peer; returns whether there is room for it."""
        with self._lock:
            self._unproven.pop(channel, None)
            if len(self._proved) >= self._max_proved:
                return False
            self._proved.add(channel)
            return True

    def leave(self, channel: Channel) -> None:
        """Forgets a connection."""
        with self._lock:
            self._unproven.pop(channel, None)
            self._proved.discard(channel)


class SparseLog:
    """Writes lines that strangers cause: so many in a minute, however many they cause."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._began_s = time.monotonic()
        self._count = 0

    def write(self, level: int, text: str, *values: object) -> None:
        """Writes a line, unless there were too many."""
        with self._lock:
            now_s = time.monotonic()
            if now_s > self._began_s + _PERIOD_S:
                self._began_s, self._count = now_s, 0
            self._count += 1
            count = self._count
        if count <= _LINES:
            self._logger.log(level, text, *values)
        if count == _LINES:
            self._logger.warning("replication: no more such lines for %.0f s", _PERIOD_S)
