# SPDX-License-Identifier: Apache-2.0
"""Each fault really happens, to a real process, at a fault point and at a time."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_moevement.errors import ExitCode
from megatron_moevement.policy.faults.fault_schedule import FaultKind

pytestmark = pytest.mark.timeout(60)

AT_A_POINT = """
from megatron_moevement.runtime.faults.fault_points import FaultPoints
from megatron_moevement.settings.faults import Fault, FaultPoint
FaultPoints([Fault.parse("{kind}:3:barrier")]).strike(3, FaultPoint.BARRIER)
print("alive")
"""
ON_A_THREAD = """
import threading
from megatron_moevement.runtime.faults.fault_points import FaultPoints
from megatron_moevement.settings.faults import Fault, FaultPoint
points = FaultPoints([Fault.parse("{kind}:3:send")])
thread = threading.Thread(target=points.strike, args=(3, FaultPoint.SEND))
thread.start()
thread.join()
print("alive")
"""
AT_A_TIME = """
import time
from datetime import timedelta
from megatron_moevement.policy.faults.fault_schedule import FaultKind, TimedFault
from megatron_moevement.runtime.faults.fault_timer import FaultTimer
behind = TimedFault(timedelta(0), 0, FaultKind.KILL)
coming = TimedFault(timedelta(seconds=1.1), 0, FaultKind("{kind}"))
with FaultTimer([behind, coming], time.time() - 1, lambda fault: print("told", flush=True)):
    while True:
        sum(range(1000))
"""


def started(program, kind):
    return subprocess.Popen(
        [sys.executable, "-c", program.format(kind=kind.value)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(program, kind):
    """Returns how a process ended, what it printed and what it complained about."""
    with started(program, kind) as process:
        out, err = process.communicate(timeout=30)
    return process.returncode, out, err


@pytest.mark.parametrize("program", [AT_A_POINT, ON_A_THREAD, AT_A_TIME])
@pytest.mark.parametrize(
    ("kind", "number"),
    [(FaultKind.KILL, signal.SIGKILL), (FaultKind.SEGFAULT, signal.SIGSEGV)],
)
def test_a_signal_kills_the_process(program, kind, number):
    code, out, err = ended(program, kind)
    assert code == -number
    assert "alive" not in out
    assert kind.value in err


@pytest.mark.parametrize("program", [AT_A_POINT, AT_A_TIME])
def test_an_exception_ends_the_main_thread_with_a_traceback(program):
    code, out, err = ended(program, FaultKind.EXCEPTION)
    assert code == ExitCode.FAILURE
    assert "alive" not in out
    assert "InjectedFaultError" in err


@pytest.mark.parametrize("program", [AT_A_POINT, ON_A_THREAD, AT_A_TIME])
def test_an_exit_ends_the_process_without_a_traceback(program):
    code, out, err = ended(program, FaultKind.EXIT)
    assert code == ExitCode.FAILURE
    assert "alive" not in out
    assert "Traceback" not in err


def test_an_exception_on_a_thread_is_that_threads():
    code, out, err = ended(ON_A_THREAD, FaultKind.EXCEPTION)
    assert (code, out.strip()) == (0, "alive")
    assert "InjectedFaultError" in err


@pytest.mark.parametrize("program", [AT_A_POINT, ON_A_THREAD])
def test_a_stopped_process_hangs_until_it_is_continued(program):
    with started(program, FaultKind.STOP) as process:
        while stopped(process.pid) is None:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGCONT)
        out, _ = process.communicate(timeout=30)
    assert (process.returncode, out.strip()) == (0, "alive")


def test_a_process_is_stopped_at_a_time():
    with started(AT_A_TIME, FaultKind.STOP) as process:
        while stopped(process.pid) is None:
            time.sleep(0.01)
        process.kill()
        out, _ = process.communicate(timeout=30)
    assert out.split() == ["told"]


def stopped(pid):
    """Returns the state of a process if it is stopped; None if it runs.

    Raises:
        AssertionError: it has ended.
    """
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    assert state not in "ZX", "it has ended"
    return state if state == "T" else None
