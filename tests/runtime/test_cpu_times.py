# SPDX-License-Identifier: Apache-2.0
"""CPU times are those of the threads that work beside training, of the process and of its cores."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_moevement.runtime.observation.cpu_times import cpu_times
from megatron_moevement.runtime.priority import BACKGROUND_NICE, is_lowered, lower_priority

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
BURNT_S = 0.3


def burn():
    """Takes CPU time on the calling thread."""
    while time.thread_time() < BURNT_S:
        pass


def in_a_thread(*calls):
    """Returns a thread's id after its calls, what to end it with, and the thread."""
    done, end = threading.Event(), threading.Event()

    def run():
        for call in calls:
            call()
        done.set()
        end.wait()

    thread = threading.Thread(target=run)
    thread.start()
    done.wait()
    return thread.native_id, end, thread


@pytest.mark.skipif(
    os.getpriority(os.PRIO_PROCESS, 0) >= BACKGROUND_NICE, reason="nothing can be lowered here"
)
def test_threads_beside_training_are_those_of_lowered_priority():
    before, began_s = cpu_times(), time.monotonic()
    beside, end_beside, beside_thread = in_a_thread(lower_priority, burn)
    other, end_other, other_thread = in_a_thread(burn)
    now, spent_s = cpu_times(), time.monotonic() - began_s
    assert is_lowered(beside)
    assert not is_lowered(other)
    assert now.beside_s[beside] >= BURNT_S - 2 * TICK_S
    assert other not in now.beside_s
    assert now.process_s - before.process_s >= 2 * BURNT_S - 2 * TICK_S
    cores_s = now.cores_s - before.cores_s
    assert 0 <= now.idle_s - before.idle_s <= cores_s
    ticks_s = 16 * TICK_S * len(os.sched_getaffinity(0))  # eight times of a core, read twice
    assert cores_s <= spent_s * len(os.sched_getaffinity(0)) + ticks_s
    for end, thread in ((end_beside, beside_thread), (end_other, other_thread)):
        end.set()
        thread.join()
    while Path(f"/proc/self/task/{beside}").exists():  # a thread ends after those who join it
        time.sleep(0.001)
    assert beside not in cpu_times().beside_s
    assert not is_lowered(beside)


def test_a_process_of_low_priority_has_no_threads_of_a_lower_one():
    code = (
        "import os, threading\n"
        "from megatron_moevement.runtime.priority import is_lowered\n"
        f"os.nice({BACKGROUND_NICE} - os.getpriority(os.PRIO_PROCESS, 0))\n"
        "print(is_lowered(threading.get_native_id()))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout == "False\n"
