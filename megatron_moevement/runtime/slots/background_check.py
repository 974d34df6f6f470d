# SPDX-License-Identifier: Apache-2.0
"""The background check: reads slots that lie in memory, slowly, to find what has changed there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

from megatron_moevement.errors import MoEvementError
from megatron_moevement.policy.watching.reading_pace import ReadingPace
from megatron_moevement.runtime.closing import Closing
from megatron_moevement.runtime.interrupts.interrupt_safe_event import InterruptSafeEvent
from megatron_moevement.runtime.priority import lower_priority
from megatron_moevement.runtime.slots.mapped_file import checksum_of_pieces
from megatron_moevement.runtime.slots.ring_file import RingFile, SlotPart, SlotRecord

PACE = ReadingPace()
PIECE_BYTES = 4 << 20
"""Read at a time; a check is given up between two of them."""
_BETWEEN_PASSES = timedelta(seconds=1)
_LONGEST_PAUSE_S = 1.0
"""A process whose threads share many cores has worked off a debt sooner than one core would."""


class CpuTimes(NamedTuple):
    """Processor time so far, in seconds: of the thread that asks, and of its whole process."""

    own_s: float
    process_s: float

    @classmethod
    def now(cls) -> CpuTimes:
        """Asks the clocks."""
        return cls(time.thread_time(), time.process_time())


class _GivenUpError(MoEvementError):
    """The check is closed."""


class BackgroundCheck(Closing):
    """Compares slots with their checksums, one after the other, on a thread of its own.

    A ring with a damaged slot is doubted: the next facts do not offer that slot.
    """

    def __init__(
        self,
        rings: Callable[[], Sequence[RingFile]],
        found: Callable[[RingFile, SlotRecord, Sequence[str]], None],
        pace: ReadingPace | None = None,
        cpu_times: Callable[[], CpuTimes] = CpuTimes.now,
    ) -> None:
        """Starts the thread.

        Args:
            rings: returns what is there to be read; the thread calls it.
            found: is told once of each damaged slot and its damaged parts, by the thread.
            pace: bounds what it takes from everything else.
            cpu_times: the clocks; the thread reads them.
        """
        self._rings = rings
        self._found = found
        self._pace = PACE if pace is None else pace
        self._cpu_times = cpu_times
        self._began = CpuTimes(0.0, 0.0)
        self._known: set[tuple[RingFile, SlotRecord]] = set()
        self._closed = InterruptSafeEvent()
        self._thread = threading.Thread(target=self._run, name="background-check", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; the slot that it reads is given up."""
        self._closed.tell()
        self._thread.join()

    def _run(self) -> None:
        lower_priority(for_slots=False)
        self._began = self._cpu_times()
        while not self._closed.wait(_BETWEEN_PASSES):
            for ring in self._rings():
                try:
                    for record in ring.records():
                        self._check(ring, record)
                except ValueError:  # the ring was closed
                    continue
                except _GivenUpError:
                    return

    def _check(self, ring: RingFile, record: SlotRecord) -> None:
        if (ring, record) in self._known:
            return
        for part in record.parts:
            if checksum_of_pieces(self._pieces(ring, record, part)) != part.checksum:
                if ring.record(record.step) != record:  # another slot took its place
                    return
                damaged = ring.damaged_parts(record)
                if damaged and ring.record(record.step) == record:
                    self._known.add((ring, record))
                    self._found(ring, record, damaged)
                return

    def _pieces(self, ring: RingFile, record: SlotRecord, part: SlotPart) -> Iterator[memoryview]:
        """Yields a part's bytes, each piece after the pauses that it costs."""
        end = part.offset + part.size_bytes
        for start in range(part.offset, end, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, end)
            self._pause(self._pace.pause_s(stop - start))
            while (debt_s := self._debt_s()) > 0:
                self._pause(min(debt_s, _LONGEST_PAUSE_S))
            yield ring.payload(record)[start:stop]

    def _debt_s(self) -> float:
        """Returns the processor time to be waited for; all that the thread does counts."""
        now, began = self._cpu_times(), self._began
        return self._pace.debt_s(now.own_s - began.own_s, now.process_s - began.process_s)

    def _pause(self, duration_s: float) -> None:
        if self._closed.wait(timedelta(seconds=duration_s)):
            raise _GivenUpError
