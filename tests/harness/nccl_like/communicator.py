# SPDX-License-Identifier: Apache-2.0
"""A communicator: it connects its members at its first operation and runs one after the other."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from megatron_moevement.runtime.interrupts.open_sockets import connected_sockets
from tests.harness.nccl_like.abort import Abort
from tests.harness.nccl_like.staging import Enqueued, beside, on_host

dist: Any = torch.distributed
Gloo = dist.ProcessGroupGloo
_wait_blocking = dist.Work.wait
"""Torch's own; a process may have another one that is interruptible."""
_LOOKS_S = 0.05
_FOREVER = timedelta(hours=1)


class AbortedError(dist.DistBackendError):  # type: ignore[misc]
    """What every call of an aborted communicator raises."""

    def __init__(self, name: str) -> None:
        super().__init__(f"NCCL communicator was aborted: {name}")


class Work:
    """One operation, or several that were launched as one; done, it stays so.

    Waiting blocks in native code until then, as reading the result of one of NCCL's does.
    """

    def __init__(self) -> None:
        self._done = threading.Lock()
        self._done.acquire()
        self._ends = threading.Lock()

    @classmethod
    def nothing(cls) -> Work:
        """Returns what has nothing to wait for."""
        work = cls()
        work.finish(lambda: None)
        return work

    def finish(self, write: Callable[[], None]) -> None:
        """Ends the operation, unless it has ended: writes its outputs and wakes who waits."""
        with self._ends:
            if self._done.locked():
                write()
                self._done.release()

    def is_completed(self) -> bool:
        """Returns whether the outputs are there."""
        return not self._done.locked()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns when the outputs are there; whoever interrupts has to wait as long."""
        ended = self._done.acquire(timeout=-1 if timeout is None else timeout.total_seconds())
        if ended:
            self._done.release()
        return ended


class Operation:
    """What one call does: inputs and outputs, and how gloo does the same to copies of them."""

    def __init__(
        self,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        start: Callable[[Any, list[torch.Tensor], list[torch.Tensor]], list[Any]],
    ) -> None:
        """Describes it; nothing runs.

        Args:
            start: gets a group of gloo, copies of inputs and of outputs; returns gloo's works.
        """
        self.inputs = [each.detach() for each in inputs]
        self.outputs = [each.detach() for each in outputs]
        self._start = start
        self._asked = Enqueued.by_now([*inputs, *outputs])
        self.results: list[torch.Tensor] = []
        self._works: list[Any] = []

    def start(self, gloo: Any) -> None:
        """Starts gloo's part, on what is in the inputs now."""
        self._asked.await_done()
        with beside([*self.inputs, *self.outputs]):
            self.results = [on_host(output) for output in self.outputs]
            own = [on_host(each) for each in self.inputs]
        self._works = self._start(gloo, own, self.results)

    def await_end(self) -> None:
        """Waits for gloo's part."""
        for work in self._works:
            if isinstance(work, dist.Work):
                _wait_blocking(work)
            else:  # made of several of gloo's
                work.await_end(_wait_blocking)

    def write(self) -> None:
        """Writes the outputs."""
        with beside(self.outputs):
            for output, result in zip(self.outputs, self.results, strict=True):
                output.copy_(result)


class Communicator:
    """Connects some ranks; any thread launches, a thread of its own runs."""

    def __init__(
        self, store: Any, rank: int, size: int, patience: timedelta | None, abort: Abort
    ) -> None:
        """Connects all members: returns when all have come, and can't be aborted until then.

        Args:
            store: of its members alone.
            patience: when to give up connecting; None: never, as NCCL in its blocking mode.

        Raises:
            DistBackendError: not all members came in time.
        """
        if rank == 0:
            store.set("ncclUniqueId", uuid.uuid4().hex)
        self._name, self._abort = store.get("ncclUniqueId").decode(), abort
        before = connected_sockets()
        self._gloo = _connected(store, rank, size, patience)
        self.sockets = connected_sockets() - before
        self._batches: queue.SimpleQueue[tuple[Sequence[Operation], Work]] = queue.SimpleQueue()
        self._running: tuple[Sequence[Operation], Work] | None = None
        self._last: list[torch.Tensor] = []
        self._is_aborted = False
        for run in (self._run, self._heed_neighbours):
            threading.Thread(target=run, name="nccl-like", daemon=True).start()

    def launch(self, batch: Sequence[Operation]) -> Work:
        """Enqueues operations that run at the same time; returns at once.

        Raises:
            AbortedError: the communicator is aborted.
        """
        if self._is_aborted:
            raise AbortedError(self._name)
        work = Work()
        self._batches.put((batch, work))
        return work

    def abort(self) -> None:
        """Ends what runs or waits, with garbage in its outputs; any thread calls it."""
        self._is_aborted = True
        self._abort.note(self._name)
        self._spoil_all()

    def _run(self) -> None:
        while not self._is_aborted:
            try:
                self._running = batch, work = self._batches.get(timeout=1)
            except queue.Empty:
                continue
            with contextlib.suppress(RuntimeError):  # a peer is gone
                for operation in batch:
                    operation.start(self._gloo)
                for operation in batch:
                    operation.await_end()
                work.finish(functools.partial(_write, batch))
                self._last = [result for each in batch for result in each.results]
            work.wait()  # only an abort ends what has failed; what comes behind it waits as well
            self._running = None
        self._spoil_running()

    def _heed_neighbours(self) -> None:
        """Lets operations end with garbage where one of the other members was aborted."""
        while not self._is_aborted:
            if self._abort.is_noted(self._name):
                self._spoil_all()
            time.sleep(_LOOKS_S)

    def _spoil_all(self) -> None:
        self._spoil_running()
        with contextlib.suppress(queue.Empty):
            while True:
                batch, work = self._batches.get_nowait()
                self._spoil(batch, work)

    def _spoil_running(self) -> None:
        running = self._running
        if running is not None:
            self._spoil(*running)

    def _spoil(self, batch: Sequence[Operation], work: Work) -> None:
        own = [each for operation in batch for each in operation.inputs]
        outputs = [each for operation in batch for each in operation.outputs]

        def write() -> None:
            with beside(outputs):
                self._abort.spoil(outputs, own, self._last)

        work.finish(write)


def _write(batch: Sequence[Operation]) -> None:
    for operation in batch:
        operation.write()


def _connected(store: Any, rank: int, size: int, patience: timedelta | None) -> Any:
    """Returns a group of gloo whose members are connected; blocks in native code until then."""
    made: queue.SimpleQueue[Any] = queue.SimpleQueue()
    ended = threading.Lock()
    ended.acquire()

    def connect() -> None:
        # Who waits for a member in ncclCommInitRank is not woken by a store that is gone.
        with contextlib.suppress(RuntimeError):
            made.put(Gloo(store, rank, size, timeout=patience or _FOREVER))
            ended.release()

    threading.Thread(target=connect, name="nccl-like connecting", daemon=True).start()
    ended.acquire(timeout=-1 if patience is None else patience.total_seconds())
    if made.empty():
        raise dist.DistBackendError("ncclCommInitRank: not all ranks have come")
    return made.get()
