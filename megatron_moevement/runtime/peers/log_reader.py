"""Reading the upstream logs of peers: what a replay is about to need is fetched ahead of it.

Each peer that is read from has one thread and one connection. Nothing is tried twice: a tensor that
can't be had intact ends the replay, and the next recovery finds out who has to join it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from datetime import timedelta

import torch

from megatron_moevement.errors import MoEvementError
from megatron_moevement.policy.job.boundary import BoundaryTag
from megatron_moevement.runtime.closing import Closing
from megatron_moevement.runtime.peers.connection import DamagedTensorError, PeerConnection
from megatron_moevement.runtime.peers.peer_thread import PeerThread, settled
from megatron_moevement.runtime.transport.handshake import Session
from megatron_moevement.runtime.transport.transport import Address, Deadline

Wanted = BoundaryTag | int
"""A logged tensor, or a step whose received hashes are wanted."""
Found = torch.Tensor | dict[BoundaryTag, int]


class LogReadError(MoEvementError):
    """A peer did not give an intact logged tensor."""


class _LogThread(PeerThread[Wanted, Found]):
    def __init__(
        self, me: Session, process: int, address: Address, deadline: timedelta, max_bytes: int
    ) -> None:
        self._max_bytes = max_bytes
        super().__init__(me, process, address, deadline, "log-reader")

    def _carry_out(self, peer: PeerConnection, request: Wanted, outcome: Future[Found]) -> None:
        deadline = Deadline(self._deadline)
        try:
            if isinstance(request, BoundaryTag):
                outcome.set_result(peer.fetch_logged(request, self._max_bytes, deadline))
            else:
                outcome.set_result(peer.fetch_received(request, deadline))
        except DamagedTensorError as error:
            outcome.set_exception(self._failure(request, str(error)))

    def _failure(self, request: Wanted, reason: str) -> LogReadError:
        is_tensor = isinstance(request, BoundaryTag)
        what = request if is_tensor else f"what was received in step {request}"
        return LogReadError(f"{what} can't be had from process {self._process}: {reason}")


class LogReader(Closing):
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
            max_bytes: of a tensor; larger ones are refused.
        """
        self._me = me
        self._addresses = dict(peers)
        self._deadline = deadline
        self._max_bytes = max_bytes
        self._peers: dict[int, _LogThread] = {}
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
        tensor = settled(self._ahead.pop(tag)).result()
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def received(self, process: int, step: int) -> Mapping[BoundaryTag, int]:
        """Returns the hashes that a process kept of what it received in a step.

        Raises:
            LogReadError: the peer does not answer in time.
        """
        hashes = settled(self._peer(process).ask(step)).result()
        assert isinstance(hashes, dict)
        return hashes

    def close(self) -> None:
        """Ends all threads and connections."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self._ahead.clear()

    def _peer(self, process: int) -> _LogThread:
        if process not in self._peers:
            self._peers[process] = _LogThread(
                self._me, process, self._addresses[process], self._deadline, self._max_bytes
            )
        return self._peers[process]
