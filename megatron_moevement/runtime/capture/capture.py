# SPDX-License-Identifier: Apache-2.0
"""Capture: copies of live tensors into host memory while training goes on.

The training thread hands over what a snapshot consists of and trains on; a thread of its own lets
the copies run, one snapshot after the other. Before the live tensors change, the training thread
waits for the copies alone; what follows them (checksums, sending) runs on.

Source: section 3.2 of the paper; on CUDA the copies run on a side stream.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch

from megatron_moevement.backends.backend import CopyStream
from megatron_moevement.errors import MoEvementError
from megatron_moevement.runtime.capture.background import Background
from megatron_moevement.runtime.priority import lower_priority
from megatron_moevement.runtime.slots.slot_record import SlotPart


@dataclasses.dataclass(frozen=True)
class HostCopies:
    """Copies of a snapshot that are enqueued together.

    Attributes:
        sources: on the device; nobody changes them until the copies are awaited.
        targets: in host memory, of the same shapes; their types are those that are captured.
    """

    sources: Sequence[torch.Tensor]
    targets: Sequence[torch.Tensor]


class CaptureError(MoEvementError, RuntimeError):
    """A snapshot could not be taken."""


@dataclasses.dataclass(frozen=True)
class _Snapshot:
    order: Callable[[], None]
    copies: Iterable[HostCopies]
    copied: Callable[[], None]
    landed: Callable[[], None]


class Capture(Background[_Snapshot]):
    """Takes snapshots; the training thread calls it. A context manager: it owns a thread.

    Whatever it is asked for raises CaptureError once a snapshot has failed.
    """

    _for_slots = True

    def __init__(self, stream: CopyStream) -> None:
        self._stream = stream
        self._prepared: _Snapshot | None = None
        self._copied = 0
        self.copy_s = 0.0
        """How long the copies of the newest snapshot took, once all of it has landed."""
        self.hash_s = 0.0
        """How long the checksums of the newest snapshot took."""
        self._checksums = ThreadPoolExecutor(
            stream.checksum_threads, "checksums", initializer=lower_priority
        )
        super().__init__("capture", self._take, _failed)

    def begin(
        self,
        copies: Iterable[HostCopies],
        landed: Callable[[], None],
        *,
        copied: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins a snapshot and returns at once.

        Args:
            copies: what is copied; the capture's thread goes through it.
            landed: called on the capture's thread when all of it lies in host memory.
            copied: called there before that, while the sources may not change yet.
        """
        self.prepare(copies, landed, copied=copied)
        self.start()

    def prepare(
        self,
        copies: Iterable[HostCopies],
        landed: Callable[[], None],
        *,
        copied: Callable[[], None] = lambda: None,
    ) -> None:
        """Does the same, but for the work: that begins with `start`, or where one waits for it."""
        self.start()
        self.check()
        self._prepared = _Snapshot(self._stream.fork(), copies, copied, landed)

    def start(self) -> None:
        """Begins the snapshot that was prepared, if it has not begun."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            self.hand_over(prepared)

    def await_copies(self) -> timedelta:
        """Waits until the sources may change; returns how long it had to."""
        self.start()
        return self.await_that(lambda: self._copied == self.begun)

    def await_landed(self) -> timedelta:
        """Waits until all snapshots have landed; returns how long it had to."""
        self.start()
        return super().await_landed()

    def parts_of(self, payload: memoryview, places: Mapping[str, slice]) -> tuple[SlotPart, ...]:
        """Returns the parts of a snapshot, with their checksums; its `landed` calls this.

        Args:
            payload: the snapshot in host memory.
            places: where in it each part lies, by name.
        """
        began_s = time.perf_counter()

        def part_of(name: str, place: slice) -> SlotPart:
            return SlotPart.of(name, place.start, payload[place])

        compute = map if self._stream.checksum_threads == 1 else self._checksums.map
        parts = tuple(compute(part_of, places.keys(), places.values()))
        self.hash_s = time.perf_counter() - began_s
        return parts

    def close(self) -> None:
        """Ends the threads, once all is done that was begun or prepared."""
        self.start()
        super().close()
        self._checksums.shutdown()

    def _take(self, snapshot: _Snapshot) -> None:
        snapshot.order()
        began_s = time.perf_counter()
        for batch in snapshot.copies:
            self._stream.copy(batch.sources, batch.targets)
        self._stream.join()
        self.copy_s = time.perf_counter() - began_s
        snapshot.copied()
        with self.changing():
            self._copied += 1
        snapshot.landed()


def _failed(error: Exception) -> CaptureError:
    return CaptureError(f"a snapshot failed: {error}")
