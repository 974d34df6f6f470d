# SPDX-License-Identifier: Apache-2.0
"""What a process does in NVRx's reserve: it keeps copies for the ranks until it gets a place.

NVRx (0.4.1) has it wait for the end of the job, and gives no way to do anything besides.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from nvidia_resiliency_ext.inprocess import CallWrapper, Wrapper, wrap
from nvidia_resiliency_ext.inprocess.progress_watchdog import ProgressWatchdog

from megatron_moevement.integrations.nvrx.control_store import ControlStore
from megatron_moevement.integrations.nvrx.notices import StoredBoard
from megatron_moevement.runtime.coordination.generation import Generation
from megatron_moevement.runtime.interrupts.thread_start import uninterrupted
from megatron_moevement.runtime.rebindings import rebind


class Holder(Protocol):
    """What a waiting process keeps for the ranks in one generation."""

    def look(self) -> None:
        """Does what ranks have asked for since the last look."""

    def end(self) -> None:
        """Learns that ranks have ended their work."""


class CalledWrapper(Wrapper):  # type: ignore[misc]  # upstream is not typed
    """A wrapper that knows its call: upstream shows it to the training function alone."""

    call: Any = None

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function, restarted after every fault."""

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with CallWrapper(self) as self.call:
                # A monitor reads nothing before the first generation begins, and nothing when it is
                # gone: the end must not wait for it to read what it was sent meanwhile.
                messages = self.call.monitor_process.msg_queue
                messages.cancel_join_thread()
                # An interrupt would leave the queue locked, as in the middle of a ping.
                messages.put = uninterrupted(messages.put)
                try:
                    return self.call(function, args, kwargs)
                finally:
                    pause(self.call.progress_watchdog)

        return wrapped


def pause(watchdog: ProgressWatchdog) -> None:
    """Pauses the watchdog, which then ends at once; the training thread calls it.

    The watchdog pauses when the training thread has run what the watchdog scheduled there. NVRx
    (0.4.1 to 0.7) waits for that in one wait, in which the thread runs nothing: where the watchdog
    schedules just then, the process hangs until its monitor kills it.
    """
    if watchdog.is_alive():
        watchdog.pause_requested.set()
        watchdog.interval_event.set()
        watchdog.spin_till_paused()


def mend_reserve(
    wrapper: CalledWrapper,
    hold: Callable[[Generation], Holder],
    connect: Callable[[], ControlStore],
) -> Callable[[int], StoredBoard]:
    """Lets processes in the reserve do something; returns the boards where ranks read of it.

    Args:
        hold: begins with it in a generation, which owns what is opened.
    """
    board_of = functools.partial(StoredBoard, functools.cache(connect))

    def reserve(state: Any, store: Any, watchdog: Any, interval: timedelta) -> None:
        generation = Generation(
            state.iteration,
            wrapper.call.atomic,
            watchdog.ping,
            watchdog.reset,
            board=board_of(state.iteration),
        )
        with generation:
            holder = hold(generation)
            watchdog.ping()
            try:
                while not _has_ended(store, interval):
                    watchdog.ping()
                    holder.look()
                    time.sleep(sys.getswitchinterval())  # an interrupt arrives here
            finally:  # a rank may be lost when others have finished
                holder.end()

    rebind(f"{wrap.__name__}:reserve_fn", reserve)
    return board_of


def _has_ended(store: Any, timeout: timedelta) -> bool:
    try:
        store.wait_for_completed(timeout)
    except dist.DistStoreError:
        return False
    return True
