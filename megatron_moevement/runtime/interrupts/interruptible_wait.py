# SPDX-License-Identifier: Apache-2.0
"""Waiting for other ranks in a way that a restart can interrupt.

A restart raises an exception in the training thread, which arrives only between two instructions of
Python. A wait in native code would keep it out until the collective's own limit. So a collective is
waited for in slices. That also shows who hangs: a rank that waits for another one gives signs of
life meanwhile, and only the culprit does not.

Groups connect in a thread that is waited for so, too: gloo (torch 2.13) waits up to five times the
limit of its collectives until each peer has connected to it. A peer that was lost meanwhile never
will, and there is no connection yet that could be shut down.

gloo only: a `wait` of NCCL does not block the host.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_moevement.runtime.interrupts.reduce_scatter import reduce_scatter_in_python
from megatron_moevement.runtime.rebindings import rebind

_SLICE = timedelta(seconds=0.05)
_TIMED_OUT = "Operation timed out!"
"""What gloo says when a slice ends; the operation goes on."""
_POINT_TO_POINT = (12, 13, 14)
"""c10d's numbers of SEND, RECV and RECVANYSOURCE."""

T = TypeVar("T")

_Ended = queue.SimpleQueue[T | Exception]
"""How one operation ended; a queue in C, for the reason in `news.py`."""


class _Waiter:
    """A thread that waits for one send or receive at a time.

    A slice that ends in the middle of a send or receive makes the group unusable, so these are
    waited for to their end, in another thread.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[dist.Work, _Ended[bool]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="point-to-point", daemon=True).start()

    def wait(self, work: dist.Work) -> bool:
        """Waits for an operation; after an interrupt the thread waits for its end alone.

        Each operation has an end of its own: that of one that was given up, whenever it comes, must
        not look like that of another one, whose data have not arrived.
        """
        ended: _Ended[bool] = queue.SimpleQueue()
        self._work.put((work, ended))
        return _result(ended)

    def _run(self) -> None:
        while True:
            work, ended = self._work.get()
            ending: bool | Exception
            try:
                ending = _wait_blocking(work)
            except Exception as error:  # noqa: BLE001  (raised again by who waits)
                ending = error
            del work
            _idle.append(self)  # also when who waited was interrupted
            ended.put(ending)
            del ended, ending


def _result(ended: _Ended[T]) -> T:
    """Waits in slices for what another thread puts there."""
    while True:
        with contextlib.suppress(queue.Empty):
            ending = ended.get(timeout=_SLICE.total_seconds())
            break
    if isinstance(ending, Exception):
        raise ending
    return ending


def interruptibly(action: Callable[[], T]) -> T:
    """Runs in another thread what may wait for long in native code.

    After an interrupt that thread goes on alone until the action's own limit, and what it returns
    is dropped.
    """
    ended: _Ended[T] = queue.SimpleQueue()

    def run() -> None:
        _connecting.append(ended)
        ending: T | Exception
        try:
            ending = action()
        except Exception as error:  # noqa: BLE001  (raised again by who waits)
            ending = error
        _connecting.remove(ended)
        ended.put(ending)

    threading.Thread(target=run, name="connecting", daemon=True).start()
    return _result(ended)


def count_connecting() -> int:
    """Returns how many threads connect; where nobody waits for one, how many are stuck."""
    return len(_connecting)


class _Connecting(type):
    """Makes groups of gloo interruptibly; to all others the class looks like gloo's own."""

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        return interruptibly(lambda: _gloo(*arguments, **options))

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _gloo)

    def __getattr__(cls, name: str) -> Any:
        return getattr(_gloo, name)


class _InterruptibleGloo(metaclass=_Connecting):
    """Stands in for `ProcessGroupGloo` where `torch.distributed` makes groups."""


_connecting: list[_Ended[Any]] = []
_gloo: Any = dist.ProcessGroupGloo
_wait_blocking = dist.Work.wait
_idle: list[_Waiter] = []
_waited_s: float | None = None


def waited_s() -> float | None:
    """Returns how long this process has waited for others; None where that is not known."""
    return _waited_s


def _wait(self: dist.Work, timeout: timedelta | None = None) -> bool:
    """Waits for an operation of torch.distributed; stands in for `Work.wait`."""
    global _waited_s  # noqa: PLW0603  (one training thread waits)
    began_s = time.perf_counter()
    done = _wait_sliced(self, timeout)
    _waited_s = (_waited_s or 0.0) + time.perf_counter() - began_s
    return done


def _wait_sliced(work: dist.Work, timeout: timedelta | None) -> bool:
    if timeout is not None:
        return _wait_blocking(work, timeout)
    kind: Any = work
    if int(kind._get_op_type()) in _POINT_TO_POINT:  # noqa: SLF001  (no public way to it)
        return (_idle.pop() if _idle else _Waiter()).wait(work)
    while True:
        try:
            return _wait_blocking(work, _SLICE)
        except RuntimeError as error:
            if str(error) != _TIMED_OUT:
                raise


def make_waits_interruptible() -> None:
    """Waits and connects in slices from now on, in all of this process, and counts the waits."""
    global _waited_s  # noqa: PLW0603
    _waited_s = _waited_s or 0.0
    rebind("torch.distributed:Work.wait", _wait)
    rebind("torch.distributed.distributed_c10d:ProcessGroupGloo", _InterruptibleGloo)
    reduce_scatter_in_python()
