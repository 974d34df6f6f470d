"""Reserve: memory that a process makes while it waits for a rank, and not while all wait for it."""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
from collections.abc import Callable
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

    def within(self, limit_bytes: int) -> ReserveSizes | None:
        """Returns what there is room for: fewer rings for copies, or None for no rank at all."""
        own_bytes = dataclasses.replace(self, copies=0).total_bytes
        if own_bytes > limit_bytes:
            return None
        room = (limit_bytes - own_bytes) // self.ring_bytes
        return dataclasses.replace(self, copies=min(self.copies, room))


@dataclasses.dataclass(frozen=True)
class Room:
    """What a process may take.

    Attributes:
        left_bytes: within its own limit.
        awaited_bytes: of that, and of what its machine has left: for copies on their way to it.
    """

    left_bytes: int = sys.maxsize
    awaited_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Reserved:
    """Memory that is there before it is needed.

    Attributes:
        ring: for own slots, pinned.
        log: for what a log holds, pinned.
        copies: for rings of copies, which no device writes.
    """

    ring: NamelessFile
    log: LogMemory
    copies: tuple[NamelessFile, ...]

    def close(self) -> None:
        """Gives it back."""
        self.log.close()
        for each in (self.ring, *self.copies):
            each.close()


class Reserve:
    """Makes and pins memory, on a thread of its own; the training thread takes it once.

    To pin takes seconds for each ten gigabytes, in which no restart could interrupt the process.
    """

    def __init__(self, folder: Path, sizes: ReserveSizes, pin: Pin, room: Room) -> None:
        """Begins to make it; where there is no room, there is less of it or none, with a line.

        Args:
            folder: of the store whose rings it may become.
        """
        self._folder, self._sizes, self._pin = folder, sizes, pin
        self._room = room
        self._lock = threading.Lock()
        self._made: Reserved | None = None
        self._is_taken = False
        self.thread = threading.Thread(target=self._make, name="reserve", daemon=True)
        self.thread.start()

    def take(self) -> Reserved | None:
        """Returns what is made, the ring for copies at work included; the rest never is.

        That one is there as soon as if the caller made it, and would lack among what is free until
        it is given back. Nobody waits for what is being pinned.
        """
        with self._lock:
            self._is_taken = True
            is_pinned = self._made is not None
        if is_pinned:
            self.thread.join()
        with self._lock:
            made, self._made = self._made, None
        return made

    def close(self) -> None:
        """Gives it back, and what is made by now when it is made."""
        with self._lock:
            made, self._made, self._is_taken = self._made, None, True
        if made is not None:
            made.close()

    def _make(self) -> None:
        try:
            sizes = self._fitting()
            if sizes is None:
                return
            pinned = self._pinned(sizes)
        except (OSError, UserError) as error:
            logger.warning("no memory is reserved for a rank: %s", str(error))
            return
        if not self._keep(pinned):
            return
        # A rank that is lost meanwhile finds what is most worth: what takes longest to make.
        for _ in range(sizes.copies):
            try:
                made = NamelessFile(self._folder, sizes.ring_bytes)
            except OSError as error:
                logger.warning("less memory is reserved for copies: %s", str(error))
                return
            if not self._keep_copy(made):
                return

    def _pinned(self, sizes: ReserveSizes) -> Reserved:
        ring = NamelessFile(self._folder, sizes.ring_bytes, self._pin_bytes)
        try:
            return Reserved(ring, LogMemory(sizes.log_bytes, self._pin), ())
        except (OSError, UserError):
            ring.close()
            raise

    def _fitting(self) -> ReserveSizes | None:
        limits = {
            "--moevement-host-memory-limit-gb": self._room.left_bytes,
            str(self._folder): free_bytes(self._folder),
        }
        where, left_bytes = min(limits.items(), key=itemgetter(1))
        return _room_for(self._sizes, left_bytes - self._room.awaited_bytes, where)

    def _keep(self, made: Reserved) -> bool:
        """Keeps it until it is taken; returns whether it may still be."""
        with self._lock:
            if not self._is_taken:
                self._made = made
                return True
        made.close()
        return False

    def _keep_copy(self, made: NamelessFile) -> bool:
        """Adds a ring to what is kept; returns whether more may be made."""
        with self._lock:
            if self._made is not None:
                copies = (*self._made.copies, made)
                self._made = dataclasses.replace(self._made, copies=copies)
                return not self._is_taken
        made.close()
        return False

    def _pin_bytes(self, memory: memoryview) -> Callable[[], None]:
        return self._pin(torch.frombuffer(memory, dtype=torch.uint8))


def _room_for(sizes: ReserveSizes, left_bytes: int, where: str) -> ReserveSizes | None:
    """Returns what there is room for, and says in a line where that is not all.

    Args:
        left_bytes: that may be taken.
        where: what has no room for more.
    """
    found = sizes.within(left_bytes)
    if found != sizes:
        text = "%s has room for %s: %d of %d bytes are left. What lacks is made when a rank is lost"
        copies = 0 if found is None else found.copies
        what = (
            "no memory of a rank in reserve"
            if found is None
            else f"copies of {copies} of {sizes.copies} ranks in reserve"
        )
        logger.warning(text, where, what, max(left_bytes, 0), sizes.total_bytes)
    return found
