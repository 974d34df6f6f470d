# SPDX-License-Identifier: Apache-2.0
"""A device that computes and copies beside the host, in threads, with latency and bandwidth."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch

from megatron_moevement.runtime.closing import Closing


class _Stream:
    """Runs what is enqueued, one after the other, on a thread of its own."""

    def __init__(self, name: str) -> None:
        self._pieces: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    def enqueue(self, piece: Callable[[], object]) -> None:
        """Enqueues a piece and returns at once."""
        self._pieces.put(piece)

    def record(self) -> threading.Event:
        """Returns an event that is set once all has run that was enqueued."""
        event = threading.Event()
        self._pieces.put(event.set)
        return event

    def end(self) -> None:
        """Ends the thread, once all has run."""
        self._pieces.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (piece := self._pieces.get()) is not None:
            piece()
            del piece


class SlowDevice(Closing):
    """A stream of computation, and side streams for copies. A context manager."""

    def __init__(self, latency_s: float = 0.0, bytes_per_s: float = float("inf")) -> None:
        """Starts the computation's thread.

        Args:
            latency_s: of each copy.
            bytes_per_s: of all copies of a stream.
        """
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self.computation = _Stream("device")
        self.copies: list[_Stream] = []
        self.synchronized = 0
        """How often the host has waited for all streams."""

    def compute(self, piece: Callable[[], object]) -> None:
        """Enqueues a computation."""
        self.computation.enqueue(piece)

    def copy_stream(self) -> SlowCopyStream:
        """Returns a side stream of this device."""
        self.copies.append(_Stream("device-copies"))
        return SlowCopyStream(self, self.copies[-1])

    def synchronize(self) -> None:
        """Waits for all streams, as `torch.cuda.synchronize` does."""
        self.synchronized += 1
        for event in [stream.record() for stream in (self.computation, *self.copies)]:
            event.wait()

    def close(self) -> None:
        """Ends all threads, once what was enqueued has run."""
        for stream in (self.computation, *self.copies):
            stream.end()


class SlowCopyStream:
    """A side stream for copies to the host."""

    checksum_threads = 2

    def __init__(self, device: SlowDevice, stream: _Stream) -> None:
        """Binds the stream; `SlowDevice.copy_stream` calls it."""
        self._device = device
        self._stream = stream

    def fork(self) -> Callable[[], None]:
        """Marks the end of what the device was asked to compute."""
        computed = self._device.computation.record()
        return lambda: self._stream.enqueue(computed.wait)

    def copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Enqueues copies."""

        def run() -> None:
            for source, target in zip(sources, targets, strict=True):
                time.sleep(self._device.latency_s + source.nbytes / self._device.bytes_per_s)
                target.copy_(source)

        self._stream.enqueue(run)

    def join(self) -> None:
        """Waits until every copy has run."""
        self._stream.record().wait()

    def host_memory(self, size_bytes: int) -> torch.Tensor:
        """Returns memory like any other."""
        return torch.empty(size_bytes, dtype=torch.uint8)
