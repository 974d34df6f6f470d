# SPDX-License-Identifier: Apache-2.0
"""Threads with a connection each to one peer: whichever is free carries out the next request.

What is large goes over several connections, in parts; what is not, over one. Parts are equal shares
of the bytes of a slot or of an operator's live state, operators whose state is small, and the
tensors of a log.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, wait
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Generic, TypeVar

from megatron_moevement.runtime.peers.connection import DamagedError, PeerConnection
from megatron_moevement.runtime.priority import lower_priority
from megatron_moevement.runtime.transport.handshake import RefusedError, Session
from megatron_moevement.runtime.transport.transport import Address, Connection, Deadline
from megatron_moevement.runtime.transport.wire import ProtocolError

FAILURES = (OSError, ProtocolError, RefusedError, DamagedError)
"""What a connection to a peer may end with."""

MAX_CONNECTIONS = 4
"""To a peer: one carries 2 to 3.5 GB/s."""
LEAST_PART_BYTES = 64 * 2**20

Q = TypeVar("Q")
A = TypeVar("A")
_POLL_S = 0.05
"""Between two looks of a waiting thread: an asynchronous exception needs a bytecode."""


def connections_for(size_bytes: int) -> int:
    """Returns over how many connections bytes go."""
    return max(1, min(MAX_CONNECTIONS, size_bytes // LEAST_PART_BYTES))


def cut(memory: memoryview) -> list[tuple[int, memoryview]]:
    """Returns equal parts of memory for as many connections, each with its offset."""
    count = connections_for(memory.nbytes)
    ends = [memory.nbytes * number // count for number in range(count + 1)]
    return [(start, memory[start:end]) for start, end in pairwise(ends)]


def carried(outcome: Future[A]) -> A:
    """Waits for a part, and returns what became of it; the waiting thread can be interrupted.

    Raises:
        ConnectionError: it was not carried.
    """
    while wait((outcome,), _POLL_S).not_done:
        pass
    try:
        failure = outcome.exception()
    except CancelledError as error:
        raise ConnectionAbortedError("closed") from error
    if failure is not None:  # another error: the traceback of this one would keep the payload
        raise ConnectionError(str(failure))
    return outcome.result()


class PeerThreads(ABC, Generic[Q, A]):
    """Carry out what is queued until one of them fails, which ends all; try nothing twice."""

    def __init__(
        self,
        me: Session,
        process: int,
        address: Address,
        deadline: timedelta,
        name: str,
        *,
        connections: int = 1,
    ) -> None:
        """Connects to nobody yet.

        Args:
            name: the threads', to which the peer's number is added.
            connections: as many of the first requests begin a thread each, which connects at once.
        """
        self._me = me
        self._process = process
        self._address = address
        self._deadline = deadline
        self._name = name
        self._most = connections
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[tuple[Q, Future[A]] | None] = queue.SimpleQueue()
        self._connections: list[Connection] = []
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._end: str | None = None

    @abstractmethod
    def _carry_out(self, peer: PeerConnection, request: Q, outcome: Future[A]) -> None:
        """Sets the outcome of a request, or raises what ends the connections."""

    @abstractmethod
    def _failure(self, request: Q, reason: str) -> Exception:
        """Returns the error of a request that is not carried out, since a connection failed."""

    def _ended(self, reason: str) -> None:
        """Notes that a connection has failed, before its request does."""

    def ask(self, request: Q) -> Future[A]:
        """Queues a request; it fails at once where a connection has."""
        outcome: Future[A] = Future()
        with self._lock:
            reason = self._end
            if reason is None and not self._closed:
                self._waiting.put((request, outcome))
                if len(self._threads) < self._most:
                    self._begin_thread()
                return outcome
        self._give_up(request, outcome, reason or "closed")
        return outcome

    def _begin_thread(self) -> None:
        thread = threading.Thread(
            target=self._run, name=f"{self._name} {self._process}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def hang_up(self) -> None:
        """Makes the threads end soon, without waiting for them."""
        with self._lock:
            self._closed = True
        self._end_all()

    def close(self) -> None:
        """Ends the threads; what is not done is given up."""
        self.hang_up()
        for thread in self._threads:
            if thread.ident is not None:  # or an interrupt came before it was started
                thread.join()

    def _end_all(self) -> None:
        with self._lock:
            for connection in self._connections:
                connection.shut_down()
            for _ in self._threads:
                self._waiting.put(None)

    def _run(self) -> None:
        lower_priority()
        current: tuple[Q, Future[A]] | None = None
        reason = "its thread ended"
        try:
            deadline = Deadline(self._deadline)
            with PeerConnection(
                self._me, self._process, self._address, deadline, self._opened
            ) as peer:
                while (current := self._waiting.get()) is not None:
                    self._carry_out(peer, *current)
        except FAILURES as error:
            reason = str(error) or type(error).__name__
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._finish(reason, current)

    def _opened(self, connection: Connection) -> None:
        with self._lock:
            self._connections.append(connection)
            if self._closed or self._end is not None:
                raise ConnectionAbortedError("closed")

    def _finish(self, reason: str, current: tuple[Q, Future[A]] | None) -> None:
        """Ends all threads if this is the first one that ends, for the reason that it had."""
        with self._lock:
            is_first = self._end is None
            self._end = reason = self._end or reason
        left = [current]
        if is_first:
            if not self._closed:
                self._ended(reason)
            with contextlib.suppress(queue.Empty):
                while True:
                    left.append(self._waiting.get_nowait())
            self._end_all()
        for each in left:
            if each is not None:
                self._give_up(*each, reason)

    def _give_up(self, request: Q, outcome: Future[A], reason: str) -> None:
        if self._closed:
            outcome.cancel()
        else:
            outcome.set_exception(self._failure(request, reason))


class Parts(PeerThreads[Callable[[PeerConnection, Deadline], A], A]):
    """Carries parts to or from a peer, each connection one at a time."""

    def fill(
        self,
        memory: memoryview,
        fetch: Callable[[int, memoryview, PeerConnection, Deadline], A],
    ) -> list[Future[A]]:
        """Has memory filled, large memory in parts.

        Args:
            fetch: fills a part, which it is given with its offset.
        """
        return [self.ask(partial(fetch, start, part)) for start, part in cut(memory)]

    def _carry_out(
        self,
        peer: PeerConnection,
        request: Callable[[PeerConnection, Deadline], A],
        outcome: Future[A],
    ) -> None:
        outcome.set_result(request(peer, Deadline(self._deadline)))

    def _failure(
        self, request: Callable[[PeerConnection, Deadline], A], reason: str
    ) -> ConnectionError:
        return ConnectionError(reason)
