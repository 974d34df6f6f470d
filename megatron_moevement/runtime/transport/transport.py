# SPDX-License-Identifier: Apache-2.0
"""Transport: how bytes get from one process to another, whatever the messages in them are.

Production uses TCP (`tcp.py`). What is said on a connection, and the proof that both ends belong to
the job, is on top of it and the same for each transport (`wire.py`, `handshake.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

Address = tuple[str, int]
"""Host and port, or what a transport has in their place; all processes are given it."""


_SLOWEST_BYTES_PER_S = 1e6
"""A peer that is slower in the long run is given up."""


class Deadline:
    """A point in time until which something has to be done; bytes that are carried move it.

    So a transfer fails where nothing moves for a while, or where it takes longer than its size
    explains, and each size has its time.
    """

    def __init__(self, within: timedelta) -> None:
        """Sets the point in time, counted from now.

        Args:
            within: also the longest time in which nothing may move.
        """
        self._within_s = within.total_seconds()
        self.since_s = time.monotonic()
        """When something moved last, on the monotonic clock."""
        self._at_s = self.since_s + self._within_s

    def carried(self, size_bytes: int) -> None:
        """Notes that bytes were sent or received."""
        self.since_s = time.monotonic()
        moved_s = self._at_s + size_bytes / _SLOWEST_BYTES_PER_S
        self._at_s = min(moved_s, self.since_s + self._within_s)

    def remaining_s(self) -> float:
        """Returns the time that is left.

        Raises:
            TimeoutError: none is.
        """
        left_s = self._at_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline has passed")
        return left_s


class Connection(Protocol):
    """Carries bytes both ways, whole and in order; one thread sends and receives on it.

    Whatever fails raises OSError: TimeoutError where a deadline passes, ConnectionError where one
    of the ends was shut down or closed. What that end sent before arrives, unless more was sent to
    it than it received.
    """

    def send(self, data: bytes | memoryview, deadline: Deadline) -> None:
        """Sends all of the bytes, out of the memory where they are."""

    def receive_into(self, target: memoryview, deadline: Deadline) -> int:
        """Fills the beginning of memory with what comes next; returns how many bytes, at least 1.

        Nothing is lost where the deadline passes.
        """

    def await_bytes(self) -> None:
        """Waits until there is something to receive or the connection ends, however long."""

    def shut_down(self) -> None:
        """Ends the connection and wakes the thread that waits in it; any thread may call it."""

    def close(self) -> None:
        """Gives back what the connection holds; called by the thread that uses it."""


class Listener(Protocol):
    """Where a process is called; one thread accepts."""

    @property
    def address(self) -> Address:
        """At which peers reach it."""

    def accept(self) -> tuple[Connection, Address]:
        """Waits for a caller; returns the connection, and where the caller is.

        Raises:
            OSError: the listener was shut down, or no connection can be had now.
        """

    def shut_down(self) -> None:
        """Lets nobody in any more, and wakes the thread that accepts; any thread may call it."""

    def close(self) -> None:
        """Gives back what the listener holds, once nobody accepts any more."""


class Transport(Protocol):
    """Makes connections; any thread calls it."""

    def dial(
        self,
        address: Address,
        deadline: Deadline,
        opened: Callable[[Connection], None] = lambda connection: None,
    ) -> Connection:
        """Connects to a listener.

        Args:
            opened: is given the connection before it connects, to be able to shut it down; what it
                raises ends the call.

        Raises:
            OSError: nobody answers in time.
        """

    def listen(self, interface: str) -> Listener:
        """Listens at an address of its own, on one interface of this machine only.

        Args:
            interface: its name, or a host name or IP address, `--moevement-replication-interface`.

        Raises:
            UserError: it is none of this machine's, or all of them.
        """
