# SPDX-License-Identifier: Apache-2.0
"""Reading the upstream logs of peers: what a replay is about to need is fetched ahead of it.

The tensors of a large step come from each peer over several connections. Nothing is tried twice: a
tensor that can't be had intact ends the replay, and the next recovery finds out who has to join it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from functools import partial

import torch

from megatron_moevement.errors import MoEvementError
from megatron_moevement.policy.job.boundary import BoundaryTag
from megatron_moevement.runtime.closing import Closing
from megatron_moevement.runtime.peers.connection import PeerConnection
from megatron_moevement.runtime.peers.peer_threads import Parts, carried, connections_for
from megatron_moevement.runtime.transport.handshake import Session
from megatron_moevement.runtime.transport.transport import Address, Deadline

Found = torch.Tensor | dict[BoundaryTag, int]
"""A logged tensor, or the hashes of what was received in a step."""


class LogReadError(MoEvementError):
    """A peer did not give an intact logged tensor."""


class LogReader(Closing):
    """Reads the logs of peers; the training thread calls it. A context manager."""

    def __init__(
        self,
        me: Session,
        peers: Mapping[int, Address],
        *,
        deadline: timedelta,
        step_bytes: int,
    ) -> None:
        """Connects to nobody yet.

        Args:
            step_bytes: of the tensors of a step, about; a larger tensor is refused.
        """
        self._me = me
        self._addresses = dict(peers)
        self._deadline = deadline
        self._step_bytes = step_bytes
        self._peers: dict[int, Parts[Found]] = {}
        self._ahead: dict[BoundaryTag, Future[Found]] = {}

    def prefetch(self, process: int, tags: Iterable[BoundaryTag]) -> None:
        """Asks for tensors that will be taken later, in the order in which they are given."""
        for tag in tags:
            self._ahead[tag] = self._peer(process).ask(partial(_tensor, tag, self._step_bytes))

    def take(self, process: int, tag: BoundaryTag) -> torch.Tensor:
        """Returns a logged tensor, in host memory; nobody else has it.

        Raises:
            LogReadError: the peer does not give it intact and in time.
        """
        if tag not in self._ahead:
            self.prefetch(process, (tag,))
        tensor = self._found(process, f"{tag}", self._ahead.pop(tag))
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def received(self, process: int, step: int) -> Mapping[BoundaryTag, int]:
        """Returns the hashes that a process kept of what it received in a step.

        Raises:
            LogReadError: the peer does not answer in time.
        """
        asked = self._peer(process).ask(partial(_hashes, step))
        hashes = self._found(process, f"what was received in step {step}", asked)
        assert isinstance(hashes, dict)
        return hashes

    def close(self) -> None:
        """Ends all threads and connections."""
        for peer in self._peers.values():
            peer.hang_up()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self._ahead.clear()

    def _peer(self, process: int) -> Parts[Found]:
        if process not in self._peers:
            self._peers[process] = Parts(
                self._me,
                process,
                self._addresses[process],
                self._deadline,
                "log-reader",
                connections=connections_for(self._step_bytes),
            )
        return self._peers[process]

    def _found(self, process: int, what: str, outcome: Future[Found]) -> Found:
        try:
            return carried(outcome)
        except ConnectionError as error:
            raise LogReadError(f"{what} can't be had from process {process}: {error}") from error


def _tensor(
    tag: BoundaryTag, max_bytes: int, peer: PeerConnection, deadline: Deadline
) -> torch.Tensor:
    return peer.fetch_logged(tag, max_bytes, deadline)


def _hashes(step: int, peer: PeerConnection, deadline: Deadline) -> dict[BoundaryTag, int]:
    return peer.fetch_received(step, deadline)
