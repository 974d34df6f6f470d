"""Reading the live state of a peer that stands still, part by part.

The training thread reads; nothing is tried twice. A state that can't be had whole ends the
recovery, and the next one finds out what is left.
"""

from __future__ import annotations

from datetime import timedelta

from megatron_moevement.errors import MoEvementError
from megatron_moevement.runtime.closing import Closing
from megatron_moevement.runtime.peers.connection import PeerConnection
from megatron_moevement.runtime.peers.peer_thread import FAILURES
from megatron_moevement.runtime.peers.state_messages import StatePart
from megatron_moevement.runtime.transport.handshake import Session
from megatron_moevement.runtime.transport.transport import Address, Deadline


class StateReadError(MoEvementError):
    """A peer did not give an intact part of its state."""


class StateReader(Closing):
    """A connection to the peer whose state is copied; one thread uses it."""

    def __init__(self, me: Session, process: int, address: Address, *, deadline: timedelta) -> None:
        """Connects.

        Raises:
            StateReadError: nobody answers, or somebody else.
        """
        self._process = process
        self._deadline = deadline
        try:
            self._peer = PeerConnection(me, process, address, Deadline(deadline))
        except FAILURES as error:
            raise StateReadError(f"process {process} can't be copied: {error}") from error

    def take(self, part: StatePart, max_bytes: int) -> bytearray:
        """Returns a part of the peer's state; its checksum was looked at.

        Args:
            max_bytes: a larger one is refused before anything is allocated.

        Raises:
            StateReadError: the peer does not give it intact and in time.
        """
        try:
            return self._peer.fetch_state(part, max_bytes, Deadline(self._deadline))
        except FAILURES as error:
            raise StateReadError(
                f"{part.name} of step {part.step} can't be had from process {self._process}: "
                f"{error}"
            ) from error

    def close(self) -> None:
        """Ends the connection."""
        self._peer.close()
