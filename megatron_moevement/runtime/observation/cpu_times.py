# SPDX-License-Identifier: Apache-2.0
"""CPU times of this process, of its threads beside training, and of its cores."""

from __future__ import annotations

import os

import psutil

from megatron_moevement.policy.watching.measurements import CpuTimes
from megatron_moevement.runtime.priority import is_lowered


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
