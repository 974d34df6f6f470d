"""Waits of the host for what a device runs, in a way that a restart can interrupt.

A `wait` of NCCL does not block the host, but reading a result does, in native code and for as long
as another rank takes: no interrupt arrives, and the progress watchdog takes the rank that waits for
one that hangs. So the host looks whether a collective has ended before it reads what came of it.
"""

from __future__ import annotations

import time

import torch.distributed as dist

_FIRST_PAUSE_S = 0.0002
_LONGEST_PAUSE_S = 0.005
_is_polling = False


def poll_before_reads() -> None:
    """Looks in slices from now on, in all of this process: its `wait` is no wait of the host."""
    global _is_polling  # noqa: PLW0603  (one backend per process)
    _is_polling = True


def await_on_host(work: dist.Work | None) -> None:
    """Waits until a collective has ended and its results can be read without a wait.

    Args:
        work: of a collective that was begun with `async_op=True`; None on ranks outside its group.
    """
    if work is None:
        return
    pause_s = _FIRST_PAUSE_S
    while _is_polling and not work.is_completed():
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    work.wait()


def barrier() -> None:
    """Returns when all ranks of the job have called it; a restart interrupts it."""
    await_on_host(dist.barrier(async_op=True))
