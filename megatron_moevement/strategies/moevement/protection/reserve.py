# SPDX-License-Identifier: Apache-2.0
"""Reserve: memory that a process makes while it waits for a rank, and not while all wait for it."""

from __future__ import annotations

import dataclasses
import errno
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from operator import itemgetter
from pathlib import Path

import torch

from megatron_moevement.backends.backend import Pin
from megatron_moevement.errors import UserError
from megatron_moevement.policy.document import Document
from megatron_moevement.runtime.slots.mapped_file import free_bytes
from megatron_moevement.runtime.slots.nameless_file import NamelessFile
from megatron_moevement.runtime.upstream_log.log import LogMemory

logger = logging.getLogger(__name__)


class Part(Enum):
    """What is made in one piece, as a line calls it."""

    RING = "a ring for own slots"
    LOG = "a log"
    COPY = "a ring for copies"


@dataclasses.dataclass(frozen=True)
class ReserveSizes(Document):
    """What any rank of the job takes at most.

    Attributes:
        ring_bytes: for the slots of one rank: its own, or copies of another one's.
        log_bytes: for its log.
        copies: ranks whose slots it keeps copies of.
    """

    ring_bytes: int
    log_bytes: int
    copies: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of host memory."""
        return self.ring_bytes * (1 + self.copies) + self.log_bytes

    def beside(self, kept: int) -> ReserveSizes:
        """Returns what a process needs more that keeps copies already.

        Args:
            kept: of how many ranks; one of these may be the rank that it gets.
        """
        return dataclasses.replace(self, copies=max(self.copies - max(kept - 1, 0), 0))

    def bytes_of(self, part: Part) -> int:
        """Returns the size of a part."""
        return self.log_bytes if part is Part.LOG else self.ring_bytes


@dataclasses.dataclass(frozen=True)
class Room:
    """What a process may take.

    Attributes:
        left_bytes: within its own limit, what is in reserve included.
        awaited_bytes: of that, and of what its machine has left: for copies on their way to it.
    """

    left_bytes: int = sys.maxsize
    awaited_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Reserved:
    """Memory that is there before it is needed.

    Attributes:
        ring: for own slots; pinned, or being pinned.
        log: for what a log holds, pinned.
        copies: for rings of copies, which no device writes.
    """

    ring: NamelessFile | None = None
    log: LogMemory | None = None
    copies: tuple[NamelessFile, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of host memory."""
        total_bytes = sum(each.total_bytes for each in self.copies)
        if self.ring is not None:
            total_bytes += self.ring.total_bytes
        if self.log is not None:
            total_bytes += self.log.data.nbytes
        return total_bytes

    def lacking(self, sizes: ReserveSizes) -> Sequence[Part]:
        """Returns what is not there, first what is most worth: what takes longest to make."""
        own = [Part.RING] if self.ring is None else []
        own += [Part.LOG] if self.log is None and sizes.log_bytes else []
        return (*own, *[Part.COPY] * (sizes.copies - len(self.copies)))

    def with_part(self, part: Reserved) -> Reserved:
        """Returns this memory and a part that was lacking."""
        copies = (*self.copies, *part.copies)
        return Reserved(self.ring or part.ring, self.log or part.log, copies)

    def close(self) -> None:
        """Gives it back."""
        for each in (self.ring, self.log, *self.copies):
            if each is not None:
                each.close()


class Reserve:
    """Makes and pins memory, on a thread of its own; the training thread takes it once.

    To pin takes seconds for each ten gigabytes, in which no restart could interrupt the process.
    """

    def __init__(self, folder: Path, pin: Pin) -> None:
        """Begins with nothing.

        Args:
            folder: of the store whose rings it may become.
        """
        self._folder, self._pin = folder, pin
        self._lock = threading.Lock()
        self._made = Reserved()
        self._planned_bytes = 0
        self._is_over = self._is_closed = False
        self._said: str | None = None
        self.thread: threading.Thread | None = None
        """Makes what there was room for when `make` was called last; None before there was any."""

    @property
    def total_bytes(self) -> int:
        """Bytes of host memory, those of what is at work included."""
        with self._lock:
            return self._planned_bytes if self._is_at_work else self._made.total_bytes

    def make(self, sizes: ReserveSizes, room: Room) -> None:
        """Begins to make what lacks and has room by now, and says in a line what has none.

        Nothing is begun while something is at work.
        """
        with self._lock:
            if self._is_over or self._is_at_work:
                return
            made = self._made
            spared = made.copies[sizes.copies :]  # the process keeps more copies than before
            self._made = made = dataclasses.replace(made, copies=made.copies[: sizes.copies])
        for each in spared:
            each.close()
        lacking = made.lacking(sizes)
        if lacking and (parts := self._fitting(lacking, sizes, made.total_bytes, room)):
            self._planned_bytes = made.total_bytes + sum(map(sizes.bytes_of, parts))
            thread = threading.Thread(
                target=self._make, args=(parts, sizes), name="reserve", daemon=True
            )
            thread.start()
            self.thread = thread  # not before: an interrupt may come in between

    def take(self) -> Reserved:
        """Returns what is made, with what is at work; the rest never is.

        What is at work is there as soon as if the caller made it, and would lack among what is free
        until it is given back. A ring that is being pinned is made.
        """
        with self._lock:
            self._is_over = True
        if self.thread is not None:
            self.thread.join()
        with self._lock:
            made, self._made = self._made, Reserved()
        return made

    def close(self) -> None:
        """Gives it back, and what is at work when it is made."""
        with self._lock:
            made, self._made = self._made, Reserved()
            self._is_over = self._is_closed = True
        made.close()

    @property
    def _is_at_work(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def _fitting(
        self, lacking: Sequence[Part], sizes: ReserveSizes, made_bytes: int, room: Room
    ) -> Sequence[Part]:
        """Returns the first parts of those that lack, as many as there is room for."""
        limits = {
            "--moevement-host-memory-limit-gb": room.left_bytes - made_bytes,
            str(self._folder): free_bytes(self._folder),
        }
        where, left_bytes = min(limits.items(), key=itemgetter(1))
        needed_bytes, fitting = room.awaited_bytes, 0
        for part in lacking:
            needed_bytes += sizes.bytes_of(part)
            fitting += needed_bytes <= left_bytes
        short_bytes = sum(map(sizes.bytes_of, lacking[fitting:]))
        if short_bytes:
            self._say(
                f"{where} has no room for {short_bytes} of {sizes.total_bytes} bytes in reserve "
                "for a rank: what lacks is made when there is room, or when a rank is lost"
            )
        return lacking[:fitting]

    def _make(self, parts: Sequence[Part], sizes: ReserveSizes) -> None:
        for part in parts:
            try:
                made = self._part(part, sizes)
            except (OSError, UserError) as error:
                self._say(f"{part.value} is not in reserve: {error}")
                if not isinstance(error, OSError) or error.errno != errno.ENOSPC:
                    self._is_over = True  # a full file system alone may mend itself
                return
            if not self._keep(made):
                return

    def _part(self, part: Part, sizes: ReserveSizes) -> Reserved:
        if part is Part.LOG:
            return Reserved(log=LogMemory(sizes.log_bytes, self._pin))
        if part is Part.RING:
            return Reserved(ring=NamelessFile(self._folder, sizes.ring_bytes, self._pin_bytes))
        return Reserved(copies=(NamelessFile(self._folder, sizes.ring_bytes),))

    def _keep(self, made: Reserved) -> bool:
        """Keeps a part for whoever takes it; returns whether more may be made."""
        with self._lock:
            if not self._is_closed:
                self._made = self._made.with_part(made)
                return not self._is_over
        made.close()
        return False

    def _say(self, text: str) -> None:
        """Says in a line what lacks, once until something else does."""
        if text != self._said:
            self._said = text
            logger.warning("%s", text)

    def _pin_bytes(self, memory: memoryview) -> Callable[[], None]:
        return self._pin(torch.frombuffer(memory, dtype=torch.uint8))
