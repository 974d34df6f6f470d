# SPDX-License-Identifier: Apache-2.0
"""CPU times of this process, of its threads beside training, and of its cores."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import psutil

from megatron_moevement.policy.watching.measurements import CpuTimes
from megatron_moevement.runtime.priority import is_lowered

_LEAST_S = 1.0
"""Between two readings: each takes a millisecond."""


def cpu_times() -> CpuTimes:
    """Returns them until now; any thread may call it. It takes about a millisecond."""
    process, allowed = psutil.Process(), os.sched_getaffinity(0)
    spent = process.cpu_times()
    cores = [core for index, core in enumerate(psutil.cpu_times(percpu=True)) if index in allowed]
    return CpuTimes(
        {
            thread.id: thread.user_time + thread.system_time
            for thread in process.threads()
            if is_lowered(thread.id)
        },
        spent.user + spent.system,
        sum(core.idle + core.iowait for core in cores),
        sum(sum(core[:8]) for core in cores),  # the others are part of these
    )


class CpuShare:
    """What threads beside training take of its CPU time.

    One of them reads, the training thread asks what was taken.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        times: Callable[[], CpuTimes] = cpu_times,
    ) -> None:
        """Has read nothing.

        Args:
            clock: returns seconds.
            times: returns CPU times until now.
        """
        self._clock, self._times = clock, times
        self._read_s = -_LEAST_S
        self._newest: CpuTimes | None = None
        self._told: CpuTimes | None = None
        self._taken = 0.0

    def read(self) -> None:
        """Reads CPU times, once a second at most."""
        now_s = self._clock()
        if now_s - self._read_s >= _LEAST_S:
            self._read_s, self._newest = now_s, self._times()

    def taken(self) -> float:
        """Returns the share since the last call; the same again where nothing was read since."""
        told, newest = self._told, self._newest
        self._told = newest
        if told is not None and newest is not None and newest is not told:
            self._taken = newest.taken_share(told)
        return self._taken
