# SPDX-License-Identifier: Apache-2.0
"""Writing the upstream log: copies and hashes of boundary tensors, beside the computation.

On the host a copy is done where it is asked for. On a GPU a thread copies on a side stream, each
tensor behind its own computation alone, and another thread hashes what has been copied.
"""

from __future__ import annotations

import dataclasses
import time
from abc import abstractmethod
from collections.abc import Callable
from datetime import timedelta

import torch

from megatron_moevement.backends.backend import BackendName, CopyStream
from megatron_moevement.errors import MoEvementError
from megatron_moevement.policy.job.boundary import BoundaryTag
from megatron_moevement.runtime.capture.background import Background
from megatron_moevement.runtime.closing import Closing
from megatron_moevement.runtime.upstream_log.log import UpstreamLog, tensor_hash


class LogWriteError(MoEvementError, RuntimeError):
    """A boundary tensor could not be copied or hashed."""


class LogWriter(Closing):
    """Copies boundary tensors; the training thread calls it."""

    def __init__(self, log: UpstreamLog) -> None:
        self.log = log

    @property
    @abstractmethod
    def spent_s(self) -> float:
        """Time that copies and hashes took until now, of whichever threads."""

    @abstractmethod
    def sent(self, tag: BoundaryTag, tensor: torch.Tensor) -> None:
        """Logs a tensor that is sent; nobody changes it any more."""

    @abstractmethod
    def received(self, tag: BoundaryTag, tensor: torch.Tensor) -> None:
        """Keeps the hash of a tensor that has come in; nobody changes it any more."""

    def await_landed(self) -> timedelta:
        """Waits until everything handed over is in the log; returns how long that took.

        Raises:
            LogWriteError: something could not be copied.
        """
        return timedelta(0)

    def close(self) -> None:
        """Ends what it has begun."""


class InlineWriter(LogWriter):
    """Copies and hashes at once; for tensors in host memory."""

    def __init__(self, log: UpstreamLog) -> None:
        super().__init__(log)
        self._spent_s = 0.0

    @property
    def spent_s(self) -> float:
        """Time that the training thread spent on it until now."""
        return self._spent_s

    def sent(self, tag: BoundaryTag, tensor: torch.Tensor) -> None:
        """Copies and hashes."""
        began_s = time.perf_counter()
        place = self.log.reserve(tag, tensor)
        if place is not None:
            place.copy_(tensor.detach())
            self.log.land(tag, place)
        self._spent_s += time.perf_counter() - began_s

    def received(self, tag: BoundaryTag, tensor: torch.Tensor) -> None:
        """Hashes."""
        began_s = time.perf_counter()
        self.log.note_received(tag, tensor_hash(tensor))
        self._spent_s += time.perf_counter() - began_s


@dataclasses.dataclass(frozen=True)
class _Copy:
    """A copy under way.

    Attributes:
        order: orders it behind the computation of its source.
        source: held until the copy has run, so that its memory is not used again.
        place: in the log; None for what came in and is only hashed.
    """

    tag: BoundaryTag
    order: Callable[[], None]
    source: torch.Tensor
    place: torch.Tensor | None


@dataclasses.dataclass(frozen=True)
class _Copied:
    """A tensor that is in host memory and is to be hashed."""

    tag: BoundaryTag
    data: torch.Tensor
    is_sent: bool


class BackgroundWriter(LogWriter):
    """Copies on a side stream on one thread, hashes on another. A context manager.

    What came in is copied to two buffers in turn: one is copied to while the other is hashed.
    """

    MAX_HELD_BYTES = 512 << 20
    """Of tensors on the device that wait for their copies; one alone may be larger."""

    def __init__(self, log: UpstreamLog, stream: CopyStream) -> None:
        super().__init__(log)
        self._stream = stream
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._begun_bytes = self._copied_bytes = 0
        self._stall = timedelta()
        self._copy_s = self._hash_s = 0.0  # each written by one thread
        self._copying = Background("upstream-log", self._copy, _failed)
        self._hashing = Background("upstream-log-hash", self._hash, _failed)

    @property
    def spent_s(self) -> float:
        """Time that both threads spent on it until now."""
        return self._copy_s + self._hash_s

    def sent(self, tag: BoundaryTag, tensor: torch.Tensor) -> None:
        """Enqueues a copy behind what the calling thread has enqueued on the device."""
        place = self.log.reserve(tag, tensor)
        if place is not None:
            self._begin(tag, tensor.detach(), place)

    def received(self, tag: BoundaryTag, tensor: torch.Tensor) -> None:
        """Enqueues a copy to be hashed and forgotten."""
        self._begin(tag, tensor.detach(), None)

    def await_landed(self) -> timedelta:
        """Waits for the threads; returns how long that, and waits since the last call, took."""
        stall = self._stall + self._copying.await_landed() + self._hashing.await_landed()
        self._stall = timedelta()
        return stall

    def close(self) -> None:
        """Ends the threads, once what was begun is done."""
        self._copying.close()
        self._hashing.close()

    def _begin(self, tag: BoundaryTag, source: torch.Tensor, place: torch.Tensor | None) -> None:
        self._hashing.check()
        self._stall += self._copying.await_that(lambda: self._has_room(source.nbytes))
        self._begun_bytes += source.nbytes
        self._copying.hand_over(_Copy(tag, self._stream.fork(), source, place))

    def _has_room(self, size_bytes: int) -> bool:
        held_bytes = self._begun_bytes - self._copied_bytes
        return not held_bytes or held_bytes + size_bytes <= self.MAX_HELD_BYTES

    def _copy(self, copy: _Copy) -> None:
        target = self._buffer_for(copy.source) if copy.place is None else copy.place
        copy.order()
        began_s = time.perf_counter()
        self._stream.copy([copy.source], [target])
        self._stream.join()
        self._copy_s += time.perf_counter() - began_s
        with self._copying.changing():
            self._copied_bytes += copy.source.nbytes
        self._hashing.hand_over(_Copied(copy.tag, target, copy.place is not None))

    def _buffer_for(self, source: torch.Tensor) -> torch.Tensor:
        """Returns room in the buffer that was used longer ago, once that use is over."""
        self._hashing.await_that(lambda: self._hashing.backlog < len(self._buffers))
        self._buffers.reverse()
        if self._buffers[0].numel() < source.nbytes:
            self._buffers[0] = self._stream.host_memory(source.nbytes)
        return self._buffers[0][: source.nbytes].view(source.dtype).view(source.shape)

    def _hash(self, copied: _Copied) -> None:
        began_s = time.perf_counter()
        if copied.is_sent:
            self.log.land(copied.tag, copied.data)
        else:
            self.log.note_received(copied.tag, tensor_hash(copied.data))
        self._hash_s += time.perf_counter() - began_s


def _failed(error: Exception) -> LogWriteError:
    return LogWriteError(f"the upstream log could not be written: {error}")


def open_writer(log: UpstreamLog, backend: BackendName, stream: CopyStream) -> LogWriter:
    """Returns the writer that suits a device.

    Args:
        stream: its copy stream, for this writer alone.
    """
    return InlineWriter(log) if backend is BackendName.CPU else BackgroundWriter(log, stream)
