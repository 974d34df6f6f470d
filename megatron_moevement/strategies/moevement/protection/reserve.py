"""Reserve: memory that a process makes while it waits for a rank, and not while all wait for it."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
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
    """What any rank of the job takes at most, in bytes: for its own slots, and for its log."""

    ring_bytes: int
    log_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of host memory."""
        return self.ring_bytes + self.log_bytes


class Reserve:
    """Makes and pins memory, on a thread of its own; the training thread takes it once.

    To pin takes seconds for each ten gigabytes, in which no restart could interrupt the process.
    """

    def __init__(self, folder: Path, sizes: ReserveSizes, pin: Pin) -> None:
        """Begins to make it; where there is no room, there is none.

        Args:
            folder: of the store whose ring it may become.
        """
        self._folder, self._sizes, self._pin = folder, sizes, pin
        self._lock = threading.Lock()
        self._made: tuple[NamelessFile, LogMemory] | None = None
        self._is_taken = False
        self.thread = threading.Thread(target=self._make, name="reserve", daemon=True)
        self.thread.start()

    def take(self) -> tuple[NamelessFile, LogMemory] | tuple[None, None]:
        """Returns what is made, for a ring and for a log; what is not made by now never is."""
        with self._lock:
            made, self._made, self._is_taken = self._made, None, True
        return (None, None) if made is None else made

    def close(self) -> None:
        """Gives it back."""
        _give_back(*self.take())

    def _make(self) -> None:
        sizes = self._sizes
        try:
            if sizes.total_bytes > free_bytes(self._folder):
                return
            ring = NamelessFile(self._folder, sizes.ring_bytes, self._pin_bytes)
            log = LogMemory(sizes.log_bytes, self._pin)
        except (OSError, UserError) as error:
            logger.warning("no memory is reserved for a rank: %s", str(error))
            return
        with self._lock:
            if not self._is_taken:
                self._made = ring, log
                return
        _give_back(ring, log)

    def _pin_bytes(self, memory: memoryview) -> Callable[[], None]:
        return self._pin(torch.frombuffer(memory, dtype=torch.uint8))


def _give_back(ring: NamelessFile | None, log: LogMemory | None) -> None:
    if ring is not None:
        ring.close()
    if log is not None:
        log.close()
