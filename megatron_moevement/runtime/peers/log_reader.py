"""Reading the upstream logs of peers: what a replay is about to need is fetched ahead of it.

Each peer that is read from has one thread and one connection. Nothing is tried twice: a tensor that
can't be had intact ends the replay, and the next recovery finds out who has to join it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Self

import torch

from megatron_moevement.errors import MoEvementError
from megatron_moevement.policy.job.boundary import BoundaryTag
from megatron_moevement.runtime.peers.connection import (
    DamagedTensorError,
    PeerConnection,
)
from megatron_moevement.runtime.peers.peer_thread import FAILURES
from megatron_moevement.runtime.transport.handshake import Session
from megatron_moevement.runtime.transport.transport import Address, Connection, Deadline

_POLL_S = 0.05
"""Between two looks of a waiting thread: an asynchronous exception needs a bytecode."""

Wanted = BoundaryTag | int
"""A logged tensor, or a step whose received hashes are wanted."""
Found = torch.Tensor | dict[BoundaryTag, int]


class LogReadError(MoEvementError):
    """A peer did not give an intact logged tensor."""


class _Peer:
    """The thread that asks one peer, one request after the other."""

    def __init__(
        self, me: Session, process: int, address: Address, deadline: timedelta, max_bytes: int
    ) -> None:
        self._me = me
        self._process = process
        self._address = address
        self._deadline = deadline
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._closed = False
        self._requests: queue.SimpleQueue[tuple[Wanted, Future[Found]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"log-reader {process}", daemon=True)
        self._thread.start()

    def ask(self, wanted: Wanted) -> Future[Found]:
        outcome: Future[Found] = Future()
        self._requests.put((wanted, outcome))
        return outcome

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._requests.put(None)
            if self._connection is not None:
                self._connection.shut_down()
        self._thread.join()

    def _opened(self, connection: Connection) -> None:
        with self._lock:
            self._connection = connection
            if self._closed:
                raise ConnectionAbortedError("closed")

    def _run(self) -> None:
        try:
            with PeerConnection(
                self._me, self._process, self._address, Deadline(self._deadline), self._opened
            ) as peer:
                self._answer_all(peer)
        except FAILURES as error:
            self._refuse_all(error)

    def _answer_all(self, peer: PeerConnection) -> None:
        while (request := self._requests.get()) is not None:
            wanted, outcome = request
            try:
                deadline = Deadline(self._deadline)
                if isinstance(wanted, BoundaryTag):
                    outcome.set_result(peer.fetch_logged(wanted, self._max_bytes, deadline))
                else:
                    outcome.set_result(peer.fetch_received(wanted, deadline))
            except (*FAILURES, DamagedTensorError) as error:
                outcome.set_exception(self._failure(wanted, error))
                if not isinstance(error, DamagedTensorError):
                    raise

    def _refuse_all(self, error: Exception) -> None:
        """Fails what is asked from now on, until the reader is closed."""
        while (request := self._requests.get()) is not None:
            wanted, outcome = request
            outcome.set_exception(self._failure(wanted, error))

    def _failure(self, wanted: Wanted, error: Exception) -> LogReadError:
        what = wanted if isinstance(wanted, BoundaryTag) else f"what was received in step {wanted}"
        return LogReadError(f"{what} can't be had from process {self._process}: {error}")


class LogReader:
    """Reads the logs of peers; the training thread calls it. A context manager."""

    def __init__(
        self,
        me: Session,
        peers: Mapping[int, Address],
        *,
        deadline: timedelta,
        max_bytes: int,
    ) -> None:
        """Connects to nobody yet.

        Args:
            me: who this process is.
            peers: for each process its server's address.
            deadline: for connecting, and for each answer.
            max_bytes: of a tensor; larger ones are refused.
        """
        self._me = me
        self._addresses = dict(peers)
        self._deadline = deadline
        self._max_bytes = max_bytes
        self._peers: dict[int, _Peer] = {}
        self._ahead: dict[BoundaryTag, Future[Found]] = {}

    def prefetch(self, process: int, tags: Iterable[BoundaryTag]) -> None:
        """Asks for tensors that will be taken later, in the order in which they are given."""
        for tag in tags:
            self._ahead[tag] = self._peer(process).ask(tag)

    def take(self, process: int, tag: BoundaryTag) -> torch.Tensor:
        """Returns a logged tensor, in host memory; nobody else has it.

        Raises:
            LogReadError: the peer does not give it intact and in time.
        """
        if tag not in self._ahead:
            self.prefetch(process, (tag,))
        tensor = _result(self._ahead.pop(tag))
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def received(self, process: int, step: int) -> Mapping[BoundaryTag, int]:
        """Returns the hashes that a process kept of what it received in a step.

        Raises:
            LogReadError: the peer does not answer in time.
        """
        hashes = _result(self._peer(process).ask(step))
        assert isinstance(hashes, dict)
        return hashes

    def close(self) -> None:
        """Ends all threads and connections."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self._ahead.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _peer(self, process: int) -> _Peer:
        if process not in self._peers:
            self._peers[process] = _Peer(
                self._me, process, self._addresses[process], self._deadline, self._max_bytes
            )
        return self._peers[process]


def _result(outcome: Future[Found]) -> Found:
    """Waits so that the waiting thread can be interrupted."""
    while wait((outcome,), _POLL_S).not_done:
        pass
    return outcome.result()
