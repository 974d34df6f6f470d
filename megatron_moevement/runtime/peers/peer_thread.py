"""A thread and a connection for each peer: carries out requests, one after the other."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Generic, TypeVar

from megatron_moevement.runtime.peers.connection import DamagedSlotError, PeerConnection
from megatron_moevement.runtime.transport.handshake import RefusedError, Session
from megatron_moevement.runtime.transport.transport import Address, Connection, Deadline
from megatron_moevement.runtime.transport.wire import ProtocolError

FAILURES = (OSError, ProtocolError, RefusedError, DamagedSlotError)
"""What a connection to a peer may end with."""

Q = TypeVar("Q")
A = TypeVar("A")
_POLL_S = 0.05
"""Between two looks of a waiting thread: an asynchronous exception needs a bytecode."""


def settled(outcome: Future[A]) -> Future[A]:
    """Returns an outcome once it is there; the waiting thread can be interrupted."""
    while wait((outcome,), _POLL_S).not_done:
        pass
    return outcome


class PeerThread(ABC, Generic[Q, A]):
    """Carries out what is queued until something fails, or it is closed; tries nothing twice."""

    def __init__(
        self, me: Session, process: int, address: Address, deadline: timedelta, name: str
    ) -> None:
        """Starts the thread, which connects at once; a subclass sets its own attributes before.

        Args:
            name: the thread's, to which the peer's number is added.
        """
        self._me = me
        self._process = process
        self._address = address
        self._deadline = deadline
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[tuple[Q, Future[A]] | None] = queue.SimpleQueue()
        self._connection: Connection | None = None
        self._closed = False
        self._end: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"{name} {process}", daemon=True)
        self._thread.start()

    @abstractmethod
    def _carry_out(self, peer: PeerConnection, request: Q, outcome: Future[A]) -> None:
        """Sets the outcome of a request, or raises what ends the connection."""

    @abstractmethod
    def _failure(self, request: Q, reason: str) -> Exception:
        """Returns the error of a request that is not carried out, since the connection failed."""

    def _ended(self, reason: str) -> None:
        """Notes that the connection has failed, before any request fails."""

    def ask(self, request: Q) -> Future[A]:
        """Queues a request; it fails at once where the connection has."""
        outcome: Future[A] = Future()
        with self._lock:
            if self._end is None:
                self._waiting.put((request, outcome))
                return outcome
            reason = self._end
        outcome.set_exception(self._failure(request, reason))
        return outcome

    def hang_up(self) -> None:
        """Makes the thread end soon, without waiting for it."""
        with self._lock:
            self._closed = True
            self._waiting.put(None)
            if self._connection is not None:
                self._connection.shut_down()

    def close(self) -> None:
        """Ends the thread; what is not done is given up."""
        self.hang_up()
        self._thread.join()

    def _run(self) -> None:
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
            self._connection = connection
            if self._closed:
                raise ConnectionAbortedError("closed")

    def _finish(self, reason: str, current: tuple[Q, Future[A]] | None) -> None:
        with self._lock:
            self._end = reason
        if not self._closed:
            self._ended(reason)
        left = [current]
        while not self._waiting.empty():
            left.append(self._waiting.get())
        for each in left:
            if each is None:
                continue
            request, outcome = each
            if self._closed:
                outcome.cancel()
            else:
                outcome.set_exception(self._failure(request, reason))
