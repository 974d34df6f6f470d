"""Writing the upstream log: copies and hashes of boundary tensors, beside the computation.

On the host a copy is done where it is asked for. On a GPU it is enqueued on a side stream at once,
and a thread of its own waits for it and hashes it.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
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

    def sent(self, tag: BoundaryTag, tensor: torch.Tensor) -> None:
        """Copies and hashes."""
        place = self.log.reserve(tag, tensor)
        if place is not None:
            place.copy_(tensor.detach())
            self.log.land(tag, place)

    def received(self, tag: BoundaryTag, tensor: torch.Tensor) -> None:
        """Hashes."""
        self.log.note_received(tag, tensor_hash(tensor))


@dataclasses.dataclass(frozen=True)
class _Copy:
    """A copy under way.

    Attributes:
        source: held until the copy has run, so that its memory is not used again.
        place: in the log; None for what came in and is only hashed.
    """

    tag: BoundaryTag
    source: torch.Tensor
    place: torch.Tensor | None


class BackgroundWriter(LogWriter):
    """Copies on a side stream and hashes on a thread of its own. A context manager."""

    def __init__(self, log: UpstreamLog, stream: CopyStream) -> None:
        super().__init__(log)
        self._stream = stream
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._background = Background("upstream-log", self._finish, _failed)

    def sent(self, tag: BoundaryTag, tensor: torch.Tensor) -> None:
        """Enqueues a copy behind what the calling thread has enqueued on the device."""
        place = self.log.reserve(tag, tensor)
        if place is not None:
            self._begin(_Copy(tag, tensor.detach(), place))

    def received(self, tag: BoundaryTag, tensor: torch.Tensor) -> None:
        """Enqueues a copy to be hashed and forgotten."""
        self._begin(_Copy(tag, tensor.detach(), None))

    def await_landed(self) -> timedelta:
        """Waits for the thread; returns how long that took."""
        return self._background.await_landed()

    def close(self) -> None:
        """Ends the thread, once what was begun is done."""
        self._background.close()

    def _begin(self, copy: _Copy) -> None:
        self._background.check()
        self._stream.fork()
        self._background.hand_over(copy)

    def _finish(self, copy: _Copy) -> None:
        source = copy.source
        if copy.place is not None:
            self._stream.copy(source, copy.place)
            self._stream.join()
            self.log.land(copy.tag, copy.place)
            return
        size_bytes = source.nbytes
        if self._scratch.numel() < size_bytes:
            self._scratch = torch.empty(size_bytes, dtype=torch.uint8)
        target = self._scratch[:size_bytes].view(source.dtype).view(source.shape)
        self._stream.copy(source, target)
        self._stream.join()
        self.log.note_received(copy.tag, tensor_hash(target))


def _failed(error: Exception) -> LogWriteError:
    return LogWriteError(f"the upstream log could not be written: {error}")


def open_writer(log: UpstreamLog, backend: BackendName, stream: CopyStream) -> LogWriter:
    """Returns the writer that suits a device.

    Args:
        stream: its copy stream, for this writer alone.
    """
    return InlineWriter(log) if backend is BackendName.CPU else BackgroundWriter(log, stream)
