# SPDX-License-Identifier: Apache-2.0
"""CPU times are those of the threads that work for slots, of the process and of its cores."""

import functools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from megatron_moevement.policy.watching.measurements import NO_CONTENTION, Contention, CpuTimes
from megatron_moevement.runtime.observation.cpu_times import CpuShare, cpu_times, waited_s
from megatron_moevement.runtime.priority import (
    BACKGROUND_NICE,
    lower_priority,
    works_for_slots,
)

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
def test_the_threads_that_count_are_those_that_work_for_slots():
    before, began_s = cpu_times(), time.monotonic()
    beside, end_beside, beside_thread = in_a_thread(lower_priority, burn)
    lowered = functools.partial(lower_priority, for_slots=False)
    other, end_other, other_thread = in_a_thread(lowered, burn)
    now, spent_s = cpu_times(), time.monotonic() - began_s
    assert works_for_slots(beside)
    assert not works_for_slots(other)
    assert now.beside_s[beside] >= BURNT_S - 2 * TICK_S
    assert other not in now.beside_s
    assert not {beside, other} & (now.waited_s or {}).keys()
    assert not {beside, other} & set(now.passes)
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
    assert not works_for_slots(beside)


@pytest.mark.skipif(cpu_times().waited_s is None, reason="the kernel counts no waits")
def test_a_thread_that_shares_its_core_waits_for_it():
    core = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{core}]); print(flush=True)\nwhile True: pass"
    pin = functools.partial(os.sched_setaffinity, 0, [core])
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        thread, end, waiting = in_a_thread(pin, burn)
        found = cpu_times().waited_s[thread]
        other.kill()
        end.set()
        waiting.join()
    assert found >= BURNT_S / 4


def test_passes_run_on_the_main_thread_and_on_those_of_torch_s_backward_for_devices():
    def called(name):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)

    names = ("pt_autograd_0", "pt_gloo_runloop")
    threads = [in_a_thread(functools.partial(called, name)) for name in names]
    found = cpu_times().passes
    for _, end, thread in threads:
        end.set()
        thread.join()
    backward, other = (number for number, *_ in threads)
    assert {os.getpid(), backward} <= set(found)
    assert other not in found


def test_waits_are_not_known_where_the_kernel_counts_none(tmp_path):
    for thread, text in {1: "5 2000000000 3\n", 2: "5 500000000 0\n", 3: "0 0 0\n", 4: ""}.items():
        (tmp_path / str(thread)).mkdir()
        (tmp_path / str(thread) / "schedstat").write_text(text)
    assert waited_s([1, 2, 3, 4, 5], tmp_path) == {1: 2.0, 2: 0.5, 3: 0.0}
    assert waited_s([3], tmp_path) is None  # counting is off
    assert waited_s([4, 5], tmp_path) is None


def test_a_process_of_low_priority_has_no_threads_of_a_lower_one():
    code = (
        "import os, threading\n"
        "from megatron_moevement.runtime.priority import lower_priority, works_for_slots\n"
        f"os.nice({BACKGROUND_NICE} - os.getpriority(os.PRIO_PROCESS, 0))\n"
        "lower_priority()\n"
        "print(works_for_slots(threading.get_native_id()))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout == "False\n"


@pytest.mark.parametrize("error", [psutil.AccessDenied(), PermissionError("no /proc")])
def test_what_a_sandbox_hides_ends_nothing_and_takes_nothing(error):
    readings = iter([CpuTimes({1: spent}, 10 * spent, 0.0, spent) for spent in (1.0, 2.0)])

    def times():
        found = next(readings, None)
        if found is None:
            raise error
        return found

    clock = iter(range(100))
    share = CpuShare(lambda: float(next(clock)), times)
    found = []
    for _ in range(3):
        share.read()
        found.append(share.contention())
    assert found == [None, Contention(0.1), NO_CONTENTION]
    share.begin()
    assert share.contention() == NO_CONTENTION


def test_cores_with_other_numbers_all_count(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4096})
    all_s = sum(sum(core[:8]) for core in psutil.cpu_times(percpu=True))
    assert cpu_times().cores_s >= all_s
