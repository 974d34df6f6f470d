# SPDX-License-Identifier: Apache-2.0
"""What peers write into the rings of a process: one slot at a time into each, part by part."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, deque
from collections.abc import Iterator

import xxhash

from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.runtime.slots.slot_record import SlotPart, SlotRecord


class Arrivals:
    """The slots that arrive; threads of the server call it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._transfers: dict[LogicalRank, int] = {}
        self._intact: dict[LogicalRank, set[str]] = {}
        self._writers: Counter[LogicalRank] = Counter()

    @contextlib.contextmanager
    def taking(self, owner: LogicalRank, transfer: int) -> Iterator[set[str] | None]:
        """Waits until nobody takes in another slot of the owner, and keeps others waiting.

        A transfer that another one has followed was given up. What it still brings would take the
        room of what came since: that of its slot may have been given to a newer one.

        Yields:
            The parts that are known to be intact, of all that the transfer has brought; None where
            another one has followed it.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: not self._writers[owner] or self._transfers[owner] >= transfer
            )
            newest = self._transfers.get(owner, -1)
            if newest < transfer:
                self._transfers[owner], self._intact[owner] = transfer, set()
            intact = self._intact[owner] if newest <= transfer else None
            self._writers[owner] += intact is not None
        if intact is None:
            yield None
            return
        try:
            yield intact
        finally:
            with self._changed:
                self._writers[owner] -= 1
                self._changed.notify_all()


class ArrivingParts:
    """Checks the parts that lie within the bytes that one message brings; its thread calls it.

    Attributes:
        intact: names of the parts that arrived as they were captured.
    """

    def __init__(self, record: SlotRecord, start: int) -> None:
        """Awaits the payload's bytes from an offset on."""
        self._awaited: deque[SlotPart] = deque()
        end = start
        for part in sorted(record.parts, key=lambda part: part.offset):
            if part.offset >= end:  # what a peer describes may overlap
                self._awaited.append(part)
                end = part.offset + part.size_bytes
        self._at = start
        self._running = xxhash.xxh3_64()
        self.intact: set[str] = set()

    def add(self, piece: memoryview) -> None:
        """Takes the bytes that come next."""
        while piece.nbytes and self._awaited:
            part = self._awaited[0]
            if self._at < part.offset:
                count = min(part.offset - self._at, piece.nbytes)
            else:
                count = min(part.offset + part.size_bytes - self._at, piece.nbytes)
                self._running.update(piece[:count])
            self._at += count
            piece = piece[count:]
            if self._at == part.offset + part.size_bytes:
                if self._running.intdigest() == part.checksum:
                    self.intact.add(part.name)
                self._running.reset()
                self._awaited.popleft()
