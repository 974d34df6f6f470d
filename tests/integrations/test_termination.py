# SPDX-License-Identifier: Apache-2.0
"""A process that hangs is ended where it stands."""

import signal
import subprocess
import sys
from datetime import timedelta

import psutil
import pytest

from megatron_moevement.integrations.nvrx.termination import (
    end_where_it_stands,
    mend_termination,
)

IGNORES = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""
WRITES = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: None)
print("ready", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
print("went on", flush=True)
signal.pause()
"""


@pytest.fixture
def start():
    """Returns a function that starts a program and waits until it is ready."""
    started = []

    def start_program(text):
        process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start_program
    for process in started:
        process.kill()
        process.communicate()


def test_a_stopped_process_does_not_go_on_before_it_is_killed(start):
    process = start(WRITES)
    watched = psutil.Process(process.pid)
    while watched.status() != psutil.STATUS_STOPPED:
        pass
    end_where_it_stands(watched, timedelta(seconds=0.3))
    assert process.wait() == -signal.SIGKILL
    assert process.stdout.read() == ""


def test_a_process_that_ignores_sigterm_is_killed(start):
    process = start(IGNORES)
    end_where_it_stands(psutil.Process(process.pid), timedelta(seconds=0.1))
    assert process.wait() == -signal.SIGKILL


def test_a_process_that_is_gone_is_left_alone(start):
    process = start(IGNORES)
    watched = psutil.Process(process.pid)
    process.kill()
    process.wait()
    end_where_it_stands(watched, timedelta(seconds=0.1))


def test_monitors_end_processes_so():
    from nvidia_resiliency_ext.inprocess import monitor_process  # noqa: PLC0415

    mend_termination()
    assert monitor_process.terminate_process is end_where_it_stands
