# SPDX-License-Identifier: Apache-2.0
"""CPU times of this process, of its threads that work for slots, and of its cores."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import psutil

from megatron_moevement.policy.watching.measurements import CpuTimes
from megatron_moevement.runtime.priority import works_for_slots

_LEAST_S = 1.0
"""Between two readings: each takes a millisecond or two, for all threads of the process."""


def cpu_times() -> CpuTimes:
    """Returns them until now; any thread may call it. It takes about a millisecond."""
    process, allowed = psutil.Process(), os.sched_getaffinity(0)
    spent = process.cpu_times()
    cores = psutil.cpu_times(percpu=True)
    if max(allowed) < len(cores):  # else they have other numbers
        cores = [cores[number] for number in sorted(allowed)]
    return CpuTimes(
        {
            thread.id: thread.user_time + thread.system_time
            for thread in process.threads()
            if works_for_slots(thread.id)
        },
        spent.user + spent.system,
        sum(core.idle + core.iowait for core in cores),
        sum(sum(core[:8]) for core in cores),  # the others are part of these
    )


class CpuShare:
    """What threads that work for slots take of the CPU time of this process.

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
            self._read_s, self._newest = now_s, self._known()

    def _known(self) -> CpuTimes | None:
        """Returns CPU times, None where a sandbox hides them: then W is chosen without them."""
        try:
            return self._times()
        except (psutil.Error, OSError):
            return None

    def taken(self) -> float:
        """Returns the share since the last call; the same again where nothing was read since."""
        told, newest = self._told, self._newest
        self._told = newest
        if newest is None:
            self._taken = 0.0
        elif told is not None and newest is not told:
            self._taken = newest.taken_share(told)
        return self._taken
