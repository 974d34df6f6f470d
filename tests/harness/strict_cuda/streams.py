# SPDX-License-Identifier: Apache-2.0
"""Streams on the strict runtime: work is done at once, devices become current as torch does it.

Source: `Stream` and `StreamContext` of torch/cuda/__init__.py, `CUDAGuard` of c10.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from tests.harness.strict_cuda.runtime import StrictRuntime


class StrictStream:
    """A stream of one device."""

    def __init__(self, runtime: StrictRuntime, device: int) -> None:
        self._runtime = runtime
        self.index = device
        self.device = torch.device("cuda", device)

    def wait_stream(self, stream: StrictStream) -> None:
        """Orders nothing: what the other stream was given is done."""

    def record_event(self) -> StrictEvent:
        """Returns what stands for all that the stream was given."""
        event = StrictEvent()
        event.record(self)
        return event

    def wait_event(self, event: StrictEvent) -> None:
        """Waits for nothing."""

    def synchronize(self) -> None:
        """Waits for nothing; a guard makes the stream's device current meanwhile.

        The guard goes back only to a device that has a context.
        """
        before = self._runtime.device
        self._runtime.set_device(self.index)
        if before in self._runtime.contexts:
            self._runtime.set_device(before)
        else:
            self._runtime.forget_device(before)


class StrictEvent:
    """What a stream had to do when it was recorded."""

    def __init__(self, *, blocking: bool = False) -> None:
        """Stands for nothing yet."""
        del blocking
        self._stream: StrictStream | None = None

    def record(self, stream: StrictStream) -> None:
        """Stands for all that the stream was given."""
        self._stream = stream

    def synchronize(self) -> None:
        """Waits for it."""
        if self._stream is not None:
            self._stream.synchronize()


class StrictStreams:
    """What `torch.cuda` has of streams and devices, in one process."""

    def __init__(self, runtime: StrictRuntime) -> None:
        self._runtime = runtime

    def make(self) -> StrictStream:
        """Returns a stream of the current device."""
        self._runtime.use_device()
        return StrictStream(self._runtime, self._runtime.device)

    def current(self, device: torch.device | None = None) -> StrictStream:
        """Returns the current stream of a device, of the current one unless it is named."""
        index = self._runtime.device if device is None or device.index is None else device.index
        return StrictStream(self._runtime, index)

    def set_device(self, device: int | torch.device) -> None:
        """Makes a device current in the calling thread."""
        index = device.index if isinstance(device, torch.device) else device
        self._runtime.set_device(index)

    def set_stream(self, stream: StrictStream) -> None:
        """Makes a stream current, and with it its device."""
        self._runtime.set_device(stream.index)

    @contextlib.contextmanager
    def entered(self, stream: StrictStream) -> Iterator[None]:
        """Makes a stream current, then the one that was; each makes its device current."""
        before = self.current()
        self._runtime.set_device(stream.index)
        try:
            yield
        finally:
            self._runtime.set_device(before.index)
