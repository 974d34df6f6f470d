# SPDX-License-Identifier: Apache-2.0
"""A transport inside of one process: links with a bandwidth, a latency and loss."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from random import Random

from megatron_moevement.runtime.transport.transport import Address, Connection, Deadline

_PIECE_BYTES = 16 * 2**10
_BUFFER_BYTES = 2**20
"""Sent and not yet received; who sends more waits, as with TCP."""


@dataclasses.dataclass(frozen=True)
class Link:
    """How good connections are, each way.

    Attributes:
        bandwidth_bytes_per_s: of each connection.
        latency: until a byte that was sent arrives.
        loss: the probability that a piece of 16 KiB is lost; it is sent again after a round trip.
            Bytes arrive whole and in order all the same, only later.
        seed: of what is lost.
    """

    bandwidth_bytes_per_s: float = math.inf
    latency: timedelta = timedelta(0)
    loss: float = 0.0
    seed: int = 0


class _Stream:
    """One direction of a connection."""

    def __init__(self, link: Link, name: str) -> None:
        self._link = link
        self._random = Random(f"{link.seed} {name}")  # noqa: S311  (no secret)
        self._changed = threading.Condition()
        self._pieces: deque[tuple[float, bytes]] = deque()  # each with the time when it is there
        self._waiting_bytes = 0
        self._is_ended = False
        self._sent_s = self._arrived_s = -math.inf  # the last piece
        self.lost = 0

    def send(self, data: bytes | memoryview, deadline: Deadline) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, view.nbytes, _PIECE_BYTES):
            piece = bytes(view[start : start + _PIECE_BYTES])
            with self._changed:
                self._wait(self._has_room, deadline)
                if self._is_ended:
                    raise BrokenPipeError("the connection has ended")
                self._pieces.append((self._arrival_s(len(piece)), piece))
                self._waiting_bytes += len(piece)
                self._changed.notify_all()

    def receive_into(self, target: memoryview, deadline: Deadline) -> int:
        with self._changed:
            self._wait(self._is_there, deadline)
            if not self._pieces:
                raise ConnectionResetError("the peer hung up")
            arrived_s, piece = self._pieces.popleft()
            taken = min(len(piece), target.nbytes)
            target[:taken] = piece[:taken]
            if taken < len(piece):
                self._pieces.appendleft((arrived_s, piece[taken:]))
            self._waiting_bytes -= taken
            self._changed.notify_all()
            return taken

    def await_bytes(self) -> None:
        with self._changed:
            self._wait(self._is_there, None)

    def end(self) -> None:
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    def _arrival_s(self, size_bytes: int) -> float:
        self._sent_s = max(self._sent_s, time.monotonic())
        self._sent_s += size_bytes / self._link.bandwidth_bytes_per_s
        latency_s, trips = self._link.latency.total_seconds(), 1
        while self._random.random() < self._link.loss:
            self.lost += 1
            trips += 2
        self._arrived_s = max(self._arrived_s, self._sent_s + trips * latency_s)
        return self._arrived_s

    def _has_room(self) -> bool:
        return self._is_ended or self._waiting_bytes < _BUFFER_BYTES

    def _is_there(self) -> bool:
        if not self._pieces:
            return self._is_ended
        return self._pieces[0][0] <= time.monotonic()

    def _wait(self, holds: Callable[[], bool], deadline: Deadline | None) -> None:
        left_s = None if deadline is None else deadline.remaining_s()
        while not holds():
            under_way_s = [self._pieces[0][0] - time.monotonic()] if self._pieces else []
            waits_s = [*under_way_s, *([] if left_s is None else [left_s])]
            self._changed.wait(max(min(waits_s), 0) if waits_s else None)
            left_s = None if deadline is None else deadline.remaining_s()


class _End:
    """One end of a connection."""

    def __init__(self, outgoing: _Stream, incoming: _Stream) -> None:
        self._outgoing, self._incoming = outgoing, incoming
        self.send = outgoing.send
        self.receive_into = incoming.receive_into
        self.await_bytes = incoming.await_bytes

    def shut_down(self) -> None:
        self._outgoing.end()
        self._incoming.end()

    def close(self) -> None:
        self.shut_down()


class _Listener:
    def __init__(self, address: Address) -> None:
        self.address = address
        self._changed = threading.Condition()
        self._calls: deque[tuple[_End, Address]] = deque()
        self._is_ended = False

    def call(self, end: _End, caller: Address) -> None:
        with self._changed:
            if self._is_ended:
                raise ConnectionRefusedError("nobody listens any more")
            self._calls.append((end, caller))
            self._changed.notify()

    def accept(self) -> tuple[Connection, Address]:
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._is_ended)
            if self._is_ended:
                raise ConnectionAbortedError("the listener was shut down")
            return self._calls.popleft()

    def shut_down(self) -> None:
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()
            for end, _ in self._calls:
                end.shut_down()

    def close(self) -> None:
        self.shut_down()


class Loopback:
    """Connections between threads of this process."""

    def __init__(self, link: Link | None = None) -> None:
        """Has no listeners yet.

        Args:
            link: how good its connections are; perfect ones unless it is given.
        """
        self._link = link or Link()
        self._ports = itertools.count(1)
        self._listeners: dict[Address, _Listener] = {}
        self._streams: list[_Stream] = []

    @property
    def lost(self) -> int:
        """How often a piece was lost."""
        return sum(stream.lost for stream in self._streams)

    def dial(
        self,
        address: Address,
        deadline: Deadline,
        opened: Callable[[Connection], None] = lambda connection: None,
    ) -> Connection:
        """Connects to a listener."""
        caller = ("loopback", next(self._ports))
        out, back = (_Stream(self._link, f"{address} {caller} {way}") for way in ("out", "back"))
        end = _End(out, back)
        with contextlib.ExitStack() as stack:
            stack.callback(end.close)
            opened(end)
            deadline.remaining_s()
            if address not in self._listeners:
                raise ConnectionRefusedError(f"nobody listens at {address}")
            self._listeners[address].call(_End(back, out), caller)
            stack.pop_all()
        self._streams += (out, back)
        return end

    def listen(self, interface: str) -> _Listener:
        """Listens at a port of its own."""
        listener = _Listener((interface, next(self._ports)))
        self._listeners[listener.address] = listener
        return listener
