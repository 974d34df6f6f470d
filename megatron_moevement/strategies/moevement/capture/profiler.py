# SPDX-License-Identifier: Apache-2.0
"""Profiler: what protection costs beside the passes of a step, and how fast its parts are."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta

from megatron_moevement.policy.watching.measurements import (
    HISTORY,
    NO_CONTENTION,
    NOT_MEASURED,
    Contention,
    Measured,
    MeasuredStep,
    Reduced,
    Work,
)
from megatron_moevement.runtime.coordination.progress import Spent
from megatron_moevement.runtime.observation.cpu_times import CpuShare
from megatron_moevement.strategies.moevement.protection.slot_replicator import SlotReplicator


class Profiler:
    """Of one rank in one generation.

    The capture's thread notes slots, the training thread does the rest; `SlotReplicator` and
    `LogWriter` have what their threads spent.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Has measured nothing.

        Args:
            clock: returns seconds.
        """
        self._clock = clock
        self.cpu_share: CpuShare | None = None
        """Of this process; None where W stays: reading it takes time."""
        self._captured: deque[Work] = deque(maxlen=HISTORY)
        self._copy_s = self._hash_s = 0.0  # until now; the capture's thread alone writes them
        self._told = Spent()
        self._steps: list[MeasuredStep] = []
        self._step_ended_s: float | None = None
        self.waits = (timedelta(),) * 2
        """Of the newest step: for the copy of a slot, and for acknowledgements."""
        self._log_wait = timedelta()
        self._is_warm = self._has_trouble = False

    def captured(self, size_bytes: int, copy_s: float, hash_s: float) -> None:
        """Notes a slot that has landed; the capture's thread calls it."""
        self._captured.append(Work(size_bytes, copy_s + hash_s))
        self._copy_s += copy_s
        self._hash_s += hash_s
        if self.cpu_share is not None:
            self.cpu_share.read()

    def step_ends(self, log_wait: timedelta) -> None:
        """Notes that a step comes to its barrier, after `waits` and a wait for the log."""
        self._log_wait = log_wait
        ended_s, before_s = self._clock(), self._step_ended_s
        self._step_ended_s = ended_s
        if before_s is not None:
            stall_s = sum(self.waits, log_wait).total_seconds()
            self._steps.append(MeasuredStep(ended_s - before_s, stall_s))

    def is_in_trouble(self) -> None:
        """Notes that transfers fail: what is waited for now says nothing of bandwidths."""
        self._has_trouble = True

    def spent(self, copies: SlotReplicator, log_s: float) -> Spent:
        """Returns what was spent since the last call.

        Args:
            log_s: that writing the log took until now.
        """
        told, now = self._told, Spent(self._copy_s, self._hash_s, copies.spent_s, log_s)
        self._told = now
        wait_copy, wait_room = (wait.total_seconds() for wait in self.waits)
        return Spent(
            copy_s=now.copy_s - told.copy_s,
            hash_s=now.hash_s - told.hash_s,
            send_s={
                process: spent_s - told.send_s.get(process, 0.0)
                for process, spent_s in now.send_s.items()
                if spent_s > told.send_s.get(process, 0.0)
            },
            log_s=now.log_s - told.log_s,
            await_copy_s=wait_copy,
            await_room_s=wait_room,
            await_log_s=self._log_wait.total_seconds(),
        )

    def measured(self, copies: SlotReplicator, *, begins: bool = False) -> Reduced:
        """Returns what was measured since the last call; NOT_MEASURED of the first steps.

        Args:
            begins: whether a schedule does, so that what was measured is of the former one.
        """
        steps, is_warm, has_trouble = self._steps, self._is_warm, self._has_trouble
        self._steps, self._is_warm, self._has_trouble = [], True, copies.is_in_trouble
        contention = self._contention(begins=begins)
        if not is_warm or has_trouble or copies.is_in_trouble or not steps or contention is None:
            return NOT_MEASURED
        captured, sent = tuple(self._captured), copies.sent.values()
        return Measured.of(captured, sent, steps, contention).vote

    def _contention(self, *, begins: bool) -> Contention | None:
        """Returns what training shares cores with, under the W in force; None: not known yet."""
        if self.cpu_share is None:
            return NO_CONTENTION
        if begins:
            self.cpu_share.begin()
        return self.cpu_share.contention()
