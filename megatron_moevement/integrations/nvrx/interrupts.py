# SPDX-License-Identifier: Apache-2.0
"""Interrupts that do not arrive: somebody swallows them, or they meet a thread that starts.

NVRx (0.4.1) interrupts the training thread by an exception at any bytecode. Libraries catch
`BaseException` here and there, as torch does in each step of a distributed checkpoint. The function
then fails in another way, because its connections are closed, and NVRx takes that for an error of
its own: the process ends, and with it the job. So the interrupt is raised again.
"""

from __future__ import annotations

import threading

from nvidia_resiliency_ext.inprocess import monitor_thread

from megatron_moevement.runtime.interrupts.thread_start import guard_starts, starting
from megatron_moevement.runtime.rebindings import rebind

_raise = monitor_thread.async_raise
_join = monitor_thread.MonitorThread.maybe_join


def _join_and_restart(thread: monitor_thread.MonitorThread, timeout: float | None = None) -> None:
    """Joins the thread that interrupts, after the function has failed; never returns.

    Raises:
        RankShouldRestart: the thread interrupted this one, now or before.
    """
    _join(thread, timeout)
    raise monitor_thread.RankShouldRestart("the interrupt was swallowed")


def _raise_outside_of_starts(
    thread: int, exception: type[BaseException], go: threading.Event | None = None
) -> None:
    """Raises an exception in a thread; never in one that it starts just now."""
    if go is not None:
        go.wait()
    with starting:
        _raise(thread, exception)


def mend_interrupts() -> None:
    """Makes interrupts arrive from now on, and what fails restart, whoever swallowed them."""
    guard_starts()
    rebind(f"{monitor_thread.__name__}:async_raise", _raise_outside_of_starts)
    rebind(f"{monitor_thread.__name__}:MonitorThread.maybe_join", _join_and_restart)
