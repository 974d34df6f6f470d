"""Capture: copies of live tensors into host memory while training goes on.

The training thread hands over what a snapshot consists of and trains on; a thread of its own lets
the copies run, one snapshot after the other. Before the live tensors change, the training thread
waits for the copies alone; what follows them (checksums, sending) runs on.

Source: section 3.2 of the paper; on CUDA the copies run on a side stream.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import TracebackType

import torch

from megatron_moevement.backends.backend import CopyStream


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """One copy of a snapshot.

    Attributes:
        source: on the device; nobody changes it until the copies are awaited.
        target: in host memory, of the same shape; its type is the one that is captured.
    """

    source: torch.Tensor
    target: torch.Tensor


class CaptureError(RuntimeError):
    """A snapshot could not be taken."""


@dataclasses.dataclass(frozen=True)
class _Snapshot:
    copies: Iterable[HostCopy]
    landed: Callable[[], None]


class Capture:
    """Takes snapshots; the training thread calls it. A context manager: it owns a thread."""

    def __init__(self, stream: CopyStream) -> None:
        """Starts the thread.

        Args:
            stream: where the copies run.
        """
        self._stream = stream
        self._snapshots: queue.SimpleQueue[_Snapshot | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._begun = self._copied = self._landed = 0
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="capture")
        self._thread.start()

    def begin(self, copies: Iterable[HostCopy], landed: Callable[[], None]) -> None:
        """Begins a snapshot and returns at once.

        Args:
            copies: what is copied; the capture's thread goes through it.
            landed: called on the capture's thread when all of it lies in host memory.

        Raises:
            CaptureError: an earlier snapshot failed.
        """
        self.check()
        self._stream.fork()
        self._begun += 1
        self._snapshots.put(_Snapshot(copies, landed))

    def await_copies(self) -> timedelta:
        """Waits until the sources may change; returns how long it had to.

        Raises:
            CaptureError: a snapshot failed.
        """
        return self._await(lambda: self._copied == self._begun)

    def await_landed(self) -> timedelta:
        """Waits until nothing is under way any more; returns how long it had to.

        Raises:
            CaptureError: a snapshot failed.
        """
        return self._await(lambda: self._landed == self._begun)

    def close(self) -> None:
        """Ends the thread, once what was begun has landed."""
        self._snapshots.put(None)
        self._thread.join()

    def __enter__(self) -> Capture:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _await(self, holds: Callable[[], bool]) -> timedelta:
        started_s = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: holds() or self._failure is not None)
        self.check()
        return timedelta(seconds=time.perf_counter() - started_s)

    def check(self) -> None:
        """Raises CaptureError if a snapshot failed."""
        if self._failure is not None:
            raise CaptureError(f"a snapshot failed: {self._failure}") from self._failure

    def _run(self) -> None:
        while (snapshot := self._snapshots.get()) is not None:
            if self._failure is not None:
                continue
            try:
                for copy in snapshot.copies:
                    self._stream.copy(copy.source, copy.target)
                self._stream.join()
                with self._changed:
                    self._copied += 1
                    self._changed.notify_all()
                snapshot.landed()
                with self._changed:
                    self._landed += 1
                    self._changed.notify_all()
            except Exception as error:  # noqa: BLE001  (raised again in the training thread)
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
