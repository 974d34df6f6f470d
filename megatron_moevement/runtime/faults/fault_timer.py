# SPDX-License-Identifier: Apache-2.0
"""Faults that come at a time: a thread waits for it and strikes its own process."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta

from megatron_moevement.policy.faults.fault_schedule import TimedFault
from megatron_moevement.runtime.closing import Closing
from megatron_moevement.runtime.faults.fault_effects import inflict_on
from megatron_moevement.runtime.interrupts.interrupt_safe_event import InterruptSafeEvent
from megatron_moevement.runtime.interrupts.thread_start import guard_starts

logger = logging.getLogger(__name__)


class FaultTimer(Closing):
    """Strikes this process when its time has come. A context manager: it owns a thread.

    The thread that opens it is the one that exceptions and `sys.exit` are for.
    """

    def __init__(
        self,
        faults: Iterable[TimedFault],
        began_s: float,
        witness: Callable[[TimedFault], None],
    ) -> None:
        """Starts the thread.

        Args:
            faults: of this process's rank, by time; what lies behind strikes nobody.
            began_s: when the job began, in seconds since the epoch.
            witness: told of a fault just before it strikes, on the timer's thread.
        """
        self._faults = faults
        self._began_s = began_s
        self._witness = witness
        self._victim = threading.get_ident()
        self._closing = InterruptSafeEvent()
        guard_starts()
        self._thread = threading.Thread(target=self._run, name="fault-timer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; nothing strikes any more."""
        self._closing.tell()
        self._thread.join()

    def _run(self) -> None:
        for fault in self._faults:
            wait_s = self._began_s + fault.at.total_seconds() - time.time()
            if wait_s < 0:
                continue
            if self._closing.wait(timedelta(seconds=wait_s)):
                return
            self._witness(fault)
            logger.warning(
                "fault on purpose: %s on rank %d, %.3f s after the job began",
                *(fault.kind.value, fault.rank, fault.at.total_seconds()),
            )
            inflict_on(fault.kind, self._victim)
