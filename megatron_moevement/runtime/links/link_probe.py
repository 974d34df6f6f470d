# SPDX-License-Identifier: Apache-2.0
"""Link probe: what copying, checksums and sending bring between processes that do nothing else.

With what a job does it with: the capture, rings in the folder of its files, the sender, the server,
the handshake and the proofs of all messages. What is sent is as large as a slot.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch

from megatron_moevement.backends.backend import CopyStream, Pin
from megatron_moevement.policy.preflight.links import LinkReport, LinkTask, Load, Sent, Unsent
from megatron_moevement.policy.watching.measurements import HISTORY, Work, achieved_bytes_per_s
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.capture.capture import Capture, HostCopies
from megatron_moevement.runtime.closing import Closing
from megatron_moevement.runtime.peers.peer_threads import carried
from megatron_moevement.runtime.peers.sender import SlotSender
from megatron_moevement.runtime.peers.server import ReplicaServer
from megatron_moevement.runtime.peers.stored_slots import StoredSlots
from megatron_moevement.runtime.slots.ring_file import RingFile, RingShape
from megatron_moevement.runtime.slots.slot_record import SlotRecord
from megatron_moevement.runtime.slots.store_identity import StoreIdentity
from megatron_moevement.runtime.transport.handshake import Session
from megatron_moevement.runtime.transport.transport import Address

_IDENTITY = StoreIdentity("check", "0")
_WARM_UP = 1
"""Slots that make connections and touch each page for the first time; they don't count."""
_LEAST = 4
_LONG_S = 1.0
"""After which no more slots are sent than count at least."""
_TOO_LONG_S = 20.0
"""After which one that counts is enough."""


class LinkProbe(Closing):
    """The end of one process; one thread uses it."""

    def __init__(self, interface: str, me: Session, deadline: timedelta) -> None:
        """Listens, and takes nothing yet.

        Args:
            interface: `--moevement-replication-interface`.
            deadline: for a transfer to move on, and for its acknowledgement.

        Raises:
            UserError: the interface is none of this machine's, or all of them.
        """
        self._me = me
        self._deadline = deadline
        self._slots = StoredSlots(None)
        self._opened = ExitStack()
        self._own: RingFile | None = None
        server = ReplicaServer(interface, me, self._slots, deadline=deadline)
        self.address: Address = self._opened.enter_context(server).address

    def prepare(self, task: LinkTask, folder: Path, pin: Pin) -> None:
        """Makes the rings of a task; their files have no names, and go with the process.

        Args:
            folder: in whose file system they are.
            pin: makes host memory a target of asynchronous copies.

        Raises:
            UserError: there is no room, or too little memory may be locked.
        """
        with tempfile.TemporaryDirectory(prefix="moevement-check-", dir=folder) as own:
            for load in task.received:
                self._slots.keep(self._ring(Path(own), load))
            if task.own is not None:
                self._own = self._ring(Path(own), task.own)
        if self._own is not None:
            self._own.pin(lambda memory: pin(torch.frombuffer(memory, dtype=torch.uint8)))

    def _ring(self, folder: Path, load: Load) -> RingFile:
        shape = RingShape.equal(1, load.slot_bytes, load.parts)
        ring = RingFile.create(folder / str(load.owner), _IDENTITY, load.owner, shape)
        self._opened.callback(ring.close)
        return ring

    def measure(self, task: LinkTask, stream: CopyStream, device: torch.device) -> LinkReport:
        """Copies slots into host memory and sends each to all holders at a time.

        Args:
            task: that was prepared.
            device: that the slots are copied from.
        """
        if task.own is None or self._own is None:
            return LinkReport(None, (), ())
        addresses = {one.process: (one.address, one.port) for one in task.holders}
        source = torch.ones(task.own.slot_bytes, dtype=torch.uint8, device=device)
        with (
            Capture(stream) as capture,
            SlotSender(self._me, addresses, deadline=self._deadline) as sender,
        ):
            captured: list[Work] = []
            unsent: dict[int, str] = {}
            for step in _rounds():
                captured.append(_capture(capture, self._own, source, step, task.own))
                unsent = _send(sender, self._own, step, addresses)
                if unsent:
                    break
            sent = {process: sender.account.sent_to(process)[_WARM_UP:] for process in addresses}
        rates = {process: achieved_bytes_per_s(works) for process, works in sent.items()}
        return LinkReport(
            achieved_bytes_per_s(captured[_WARM_UP:]),
            tuple(Sent(process, rate) for process, rate in rates.items() if rate is not None),
            tuple(Unsent(process, reason) for process, reason in unsent.items()),
        )

    def close(self) -> None:
        """Ends the server, and gives the memory back."""
        self._opened.close()


def _rounds() -> Iterator[int]:
    """Yields the steps whose slots are sent, until enough of them are."""
    yield from range(_WARM_UP)
    began_s = time.monotonic()
    for counted in range(HISTORY):
        spent_s = time.monotonic() - began_s
        is_enough = counted >= _LEAST and spent_s >= _LONG_S
        if is_enough or (counted and spent_s >= _TOO_LONG_S):
            return
        yield _WARM_UP + counted


def _capture(capture: Capture, ring: RingFile, source: torch.Tensor, step: int, load: Load) -> Work:
    """Copies a slot into a ring and publishes it; returns what copy and checksums took."""
    buffer = ring.reserve(step)[: load.slot_bytes]
    target = torch.frombuffer(buffer, dtype=torch.uint8)
    ends = [load.slot_bytes * number // load.parts for number in range(load.parts + 1)]
    pieces = [slice(*pair) for pair in itertools.pairwise(ends)]

    def landed() -> None:
        places = {str(number): piece for number, piece in enumerate(pieces)}
        parts = capture.parts_of(buffer, places)
        ring.publish(SlotRecord(0, Window(step, 1), 0, step, load.slot_bytes, parts))

    ring.invalidate(step)
    capture.begin((HostCopies([source[piece]], [target[piece]]) for piece in pieces), landed)
    capture.await_landed()
    return Work(load.slot_bytes, capture.copy_s + capture.hash_s)


def _send(sender: SlotSender, ring: RingFile, step: int, holders: Iterable[int]) -> dict[int, str]:
    """Sends a slot to all holders and waits for them; returns why some did not get it."""
    record, unsent = ring.held(step), {}
    for process, outcome in sender.send(ring.owner, record, ring.payload(record), holders).items():
        try:
            carried(outcome)
        except ConnectionError as error:
            unsent[process] = str(error)
    return unsent
