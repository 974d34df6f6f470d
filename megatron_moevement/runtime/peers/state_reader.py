# SPDX-License-Identifier: Apache-2.0
"""Reading the live state of a peer that stands still, one part of it after the other.

The training thread reads, other threads bring what it is about to need. Nothing is tried twice. A
state that can't be had whole ends the recovery, and the next one finds out what is left.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from datetime import timedelta
from functools import partial

from megatron_moevement.errors import MoEvementError
from megatron_moevement.runtime.closing import Closing
from megatron_moevement.runtime.peers.connection import PeerConnection
from megatron_moevement.runtime.peers.peer_threads import (
    LEAST_PART_BYTES,
    Parts,
    carried,
    connections_for,
)
from megatron_moevement.runtime.peers.state_messages import StateRange
from megatron_moevement.runtime.transport.handshake import Session
from megatron_moevement.runtime.transport.transport import Address, Deadline


class StateReadError(MoEvementError):
    """A peer did not give an intact part of its state."""


@dataclasses.dataclass(frozen=True)
class _Part:
    """A part of a state that is under way."""

    name: str
    memory: memoryview
    outcomes: list[Future[int]]


class StateReader(Closing):
    """Connections to the peer whose state is copied; one thread uses it."""

    def __init__(
        self,
        me: Session,
        process: int,
        address: Address,
        *,
        deadline: timedelta,
        size_bytes: int,
    ) -> None:
        """Connects to nobody yet.

        Args:
            size_bytes: of the state; a large one takes several connections.
        """
        self._process = process
        connections = connections_for(size_bytes)
        self._ahead_bytes = connections * LEAST_PART_BYTES
        self._parts: Parts[int] = Parts(
            me, process, address, deadline, "state-reader", connections=connections
        )

    def take(self, step: int, sizes: Mapping[str, int]) -> Iterator[tuple[str, memoryview]]:
        """Yields parts of S_step by name, in the order that is given; their checksums are right.

        While one is used, the next ones arrive.

        Args:
            sizes: bytes of each part, at most; more are refused before anything is allocated.

        Raises:
            StateReadError: the peer does not give one intact and in time.
        """
        waiting, under_way = deque(sizes.items()), deque[_Part]()
        while waiting or under_way:
            first = under_way.popleft() if under_way else self._ask(step, *waiting.popleft())
            while waiting and sum(one.memory.nbytes for one in under_way) < self._ahead_bytes:
                under_way.append(self._ask(step, *waiting.popleft()))
            yield first.name, self._whole(step, first)

    def _ask(self, step: int, name: str, max_bytes: int) -> _Part:
        memory = memoryview(bytearray(max_bytes))
        return _Part(name, memory, self._parts.fill(memory, partial(_fetch, step, name)))

    def _whole(self, step: int, part: _Part) -> memoryview:
        try:
            part_bytes = max(carried(outcome) for outcome in part.outcomes)
            if part_bytes > part.memory.nbytes:
                raise ConnectionError(
                    f"it has {part_bytes} bytes, at most {part.memory.nbytes} are expected"
                )
        except ConnectionError as error:
            raise StateReadError(
                f"{part.name} of step {step} can't be had from process {self._process}: {error}"
            ) from error
        return part.memory[:part_bytes]

    def close(self) -> None:
        """Ends all threads and connections."""
        self._parts.close()


def _fetch(  # noqa: PLR0917  (the last four are given by who fills memory)
    step: int, name: str, start: int, into: memoryview, peer: PeerConnection, deadline: Deadline
) -> int:
    return peer.fetch_state(StateRange(step, name, start, into.nbytes), into, deadline)
