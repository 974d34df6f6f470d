# SPDX-License-Identifier: Apache-2.0
"""CPU times of this process, of its threads that work for slots, and of its cores."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil

from megatron_moevement.policy.watching.measurements import NO_CONTENTION, Contention, CpuTimes
from megatron_moevement.runtime.priority import may_train, works_for_slots

_LEAST_S = 1.0
"""Between two readings: each takes a millisecond or two, for all threads of the process."""


def cpu_times() -> CpuTimes:
    """Returns them until now; any thread may call it. It takes about a millisecond."""
    process, allowed = psutil.Process(), os.sched_getaffinity(0)
    spent, threads = process.cpu_times(), process.threads()
    cores = psutil.cpu_times(percpu=True)
    if max(allowed) < len(cores):  # else they have other numbers
        cores = [cores[number] for number in sorted(allowed)]
    normal = [thread.id for thread in threads if may_train(thread.id)]
    return CpuTimes(
        {
            thread.id: thread.user_time + thread.system_time
            for thread in threads
            if works_for_slots(thread.id)
        },
        spent.user + spent.system,
        sum(core.idle + core.iowait for core in cores),
        sum(sum(core[:8]) for core in cores),  # the others are part of these
        time.monotonic(),
        waited_s(normal),
        frozenset(thread for thread in normal if _runs_passes(thread)),
    )


def _runs_passes(thread: int) -> bool:
    """Returns whether passes run on a thread: forward the main one, backward torch's for a GPU."""
    if thread == os.getpid():
        return True
    try:
        return Path(f"/proc/self/task/{thread}/comm").read_text().startswith("pt_autograd")
    except OSError:  # it has ended
        return False


def waited_s(
    threads: Iterable[int], folder: Path = Path("/proc/self/task")
) -> Mapping[int, float] | None:
    """Returns how long threads have waited for a core; None where the kernel doesn't count it.

    Args:
        threads: their native ids.
        folder: with a folder of each thread.
    """
    found, ran = {}, 0
    for thread in threads:
        try:
            text = (folder / str(thread) / "schedstat").read_text()
            _, waited_ns, times = map(int, text.split())
        except (OSError, ValueError):  # it has ended, or there is no such file
            continue
        found[thread], ran = waited_ns / 1e9, ran + times
    return found if ran else None  # a kernel that is told not to count has zeros alone


class CpuShare:
    """What threads that work for slots take of the CPU time of this process, under the W in force.

    One of them reads, the training thread asks. Readings that cross each other lose no more than
    one of them.
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
        self._is_hidden = False
        self.begin()

    def begin(self) -> None:
        """Forgets what was read: another W is in force, and counts from the next reading on."""
        self._read_s = -math.inf
        self._newest: CpuTimes | None = None
        self._told: CpuTimes | None = None
        self._contention: Contention | None = None

    def read(self) -> None:
        """Reads CPU times, once a second at most."""
        now_s = self._clock()
        if now_s - self._read_s < _LEAST_S:
            return
        self._read_s = now_s
        try:
            self._newest = self._times()
        except (psutil.Error, OSError):  # a sandbox hides them: then W is chosen without them
            self._is_hidden = True
            return
        self._is_hidden = False
        if self._told is None:
            self._told = self._newest

    def contention(self) -> Contention | None:
        """Returns the shares since the last call, None before two readings.

        It is the same again where nothing was read since.
        """
        if self._is_hidden:
            return NO_CONTENTION
        told, newest = self._told, self._newest
        if told is not None and newest is not None and newest is not told:
            self._told, self._contention = newest, newest.contention(told)
        return self._contention
