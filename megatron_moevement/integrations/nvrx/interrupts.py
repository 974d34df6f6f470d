"""Interrupts that somebody swallowed: they are raised again, where the process would end else.

NVRx (0.4.1) interrupts the training thread by an exception at any bytecode. Libraries catch
`BaseException` here and there, as torch does in each step of a distributed checkpoint. The function
then fails in another way, because its connections are closed, and NVRx takes that for an error of
its own: the process ends, and with it the job.
"""

from __future__ import annotations

from nvidia_resiliency_ext.inprocess import monitor_thread

_join = monitor_thread.MonitorThread.maybe_join


def _join_and_restart(thread: monitor_thread.MonitorThread, timeout: float | None = None) -> None:
    """Joins the thread that interrupts, after the function has failed; never returns.

    Raises:
        RankShouldRestart: the thread interrupted this one, now or before.
    """
    _join(thread, timeout)
    raise monitor_thread.RankShouldRestart("the interrupt was swallowed")


def mend_interrupts() -> None:
    """Makes functions that fail from now on restart, whoever swallowed their interrupt."""
    monitor_thread.MonitorThread.maybe_join = _join_and_restart
