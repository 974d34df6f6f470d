# SPDX-License-Identifier: Apache-2.0
"""The stores of a job are lost: all processes stop, and another launch loses no step."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from random import Random

import psutil
import pytest

from megatron_moevement.integrations.nvrx.control_store import request_restart
from megatron_moevement.runtime.observation.events import EventName
from tests.harness.interruption import Run, digest_differences
from tests.harness.log_lines import log_lines
from tests.harness.protected_run import Case, plans_of
from tests.harness.restarted_run import (
    RESTARTABLE,
    await_step,
    events_of,
    restartable_program,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

CASE = Case.of("vpp2 bf16 distributed grouped", 3)
COMMAND = (sys.executable, "-m", "megatron_moevement.cli", "stores")
STATE_FLUSHED = 75
SPARE = 2
(LIMIT_S,) = [float(flag.partition("=")[2]) for flag in RESTARTABLE if "barrier-timeout" in flag]


class Stores:
    """Both stores of a job, in a process of their own."""

    def __init__(self):
        self.process = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, text=True)
        self.env = dict(pair.split("=") for pair in self.process.stdout.readline().split())
        self.control = (self.env["MASTER_ADDR"], int(self.env["MOEVEMENT_CONTROL_PORT"]))
        self.lost_s = 0.0

    def lose(self):
        self.process.kill()
        self.lost_s = time.monotonic()

    def check_ended(self, result):
        """Checks that all processes of a job ended in time."""
        assert time.monotonic() - self.lost_s < LIMIT_S
        assert not result.timed_out, result.describe()

    def line(self, process, state):
        """Returns how the line begins that a process of the job says at its end."""
        where = "; its state is in memory: " if state else "; "
        end = " to go on" if state else ""
        return (
            f"process {process} stops: the control store at {{}}:{{}} is lost".format(*self.control)
            + f"{where}host new stores and launch the job again{end}"
        )


@pytest.fixture
def start(megatron_fork_server, text, tmp_path):
    """Returns a function that starts the job with stores of their own; yields all three."""

    @contextlib.contextmanager
    def start_job(*flags):
        stores = Stores()
        try:
            program = restartable_program(CASE, megatron_fork_server, text, 1)
            run = Run(dataclasses.replace(program, env=stores.env), tmp_path)
            with run.start(*flags) as job:
                yield stores, run, job
        finally:
            stores.process.kill()
            stores.process.communicate()

    return start_job


@pytest.fixture
def check_relaunch(megatron_fork_server, text, uninterrupted):
    """Returns a function that launches a job again, with stores of its own, to its end."""

    def launch(run):
        committed = max(event.iteration for event in events_of(run, EventName.ITERATION, None))
        program = restartable_program(CASE, megatron_fork_server, text, 1)
        again = Run(program, run._folder)
        assert digest_differences(again.finish(), uninterrupted(CASE)) == []
        last = plans_of(again)[-1]
        assert (last["verdict"], last["target"] >= committed) == ("GLOBAL", True)
        assert list(run.store.rglob("*")) == []

    return launch


def check_all_flushed(stores, job):
    """Waits for the end of a job that lost its stores: every process leaves its state in memory."""
    result = job.wait()
    stores.check_ended(result)
    assert result.exit_codes == (STATE_FLUSHED,) * 3, result.describe()
    return result


def test_all_processes_stop_and_say_why(start):
    with start() as (stores, run, job):
        await_step(run, job, 1)
        stores.lose()
        result = check_all_flushed(stores, job)
    for rank in result.ranks:
        said = [line.text for line in log_lines(rank.stderr)]
        assert any(line.startswith(stores.line(rank.rank, state=True)) for line in said)
        assert "Traceback" not in rank.stderr
    assert len(list(run.store.glob("*/process-*"))) == 3  # a spare keeps copies


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_relaunch_loses_no_step(start, check_relaunch, seed):
    with start() as (stores, run, job):
        await_step(run, job, CASE.protected_from)
        time.sleep(Random(seed).uniform(0, 1))
        stores.lose()
        check_all_flushed(stores, job)
    check_relaunch(run)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_nor_does_it_when_a_rank_dies_right_after(start, check_relaunch, seed):
    random = Random(seed)
    with start() as (stores, run, job):
        await_step(run, job, CASE.protected_from)
        time.sleep(random.uniform(0, 1))
        stores.lose()
        time.sleep(random.uniform(0, 0.1))
        job.kill(seed % 2)
        result = job.wait()
    stores.check_ended(result)
    codes = [code for process, code in enumerate(result.exit_codes) if process != seed % 2]
    assert codes == [STATE_FLUSHED] * 2, result.describe()
    check_relaunch(run)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_nor_when_they_are_lost_in_a_restart(start, check_relaunch, seed):
    with start() as (stores, run, job):
        await_step(run, job, CASE.protected_from)
        request_restart(stores.control, 0, job.secret)
        time.sleep(Random(seed).uniform(0, 0.8))
        stores.lose()
        check_all_flushed(stores, job)
    check_relaunch(run)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_when_they_are_lost_at_the_end_training_ends_or_goes_on(
    start, megatron_fork_server, text, uninterrupted, seed
):
    with start() as (stores, run, job):
        await_step(run, job, CASE.train_iters)
        time.sleep(Random(seed).uniform(0, 0.4))
        stores.lose()
        result = job.wait()
    stores.check_ended(result)
    assert set(result.exit_codes) <= {0, STATE_FLUSHED}, result.describe()
    if STATE_FLUSHED in result.exit_codes[:SPARE]:
        program = restartable_program(CASE, megatron_fork_server, text, 1)
        digest = Run(program, run._folder).finish()
    else:
        digest = run._digest()
    assert digest_differences(digest, uninterrupted(CASE)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_when_they_are_lost_at_the_start_nobody_waits(start, seed):
    with start("--inprocess-barrier-timeout=26") as (stores, _, job):
        time.sleep(Random(seed).uniform(0, 2))
        stores.lose()
        result = job.wait()
    # Who connects then tries for the barrier's limit, more than once.
    assert not result.timed_out, result.describe()
    assert 0 not in result.exit_codes, result.describe()


@pytest.mark.slow
def test_a_process_that_hangs_is_ended_and_no_monitor_is_left(start, check_relaunch):
    limits = ("--inprocess-soft-timeout=4", "--inprocess-hard-timeout=6")
    with start(*limits) as (stores, run, job):
        await_step(run, job, CASE.protected_from)
        monitors = monitors_of(job)
        job.kill(1, signal.SIGSTOP)
        stores.lose()
        assert [job.wait_for_rank(rank) for rank in (0, SPARE)] == [STATE_FLUSHED] * 2
        while len([one for one in monitors if lives(one)]) > 1:
            assert time.monotonic() - stores.lost_s < LIMIT_S
        result = job.wait()
    stores.check_ended(result)
    assert result.exit_codes[1] == -signal.SIGKILL, result.describe()
    check_relaunch(run)


def lives(process):
    """Returns whether a process has not ended; nobody collects those of a job before its end."""
    return process.status() != psutil.STATUS_ZOMBIE


def monitors_of(job):
    """Returns the monitors of a job's processes: each has left the session of its rank."""
    supervisor = psutil.Process(job.pids[0]).parent()
    own = os.getsid(supervisor.pid)
    others = [one for one in supervisor.children() if one.pid not in job.pids]
    monitors = [one for one in others if os.getsid(one.pid) != own and lives(one)]
    assert len(monitors) == len(job.pids)
    return monitors


@pytest.mark.slow
def test_slow_stores_end_nothing(start, uninterrupted):
    with start() as (stores, run, job):
        await_step(run, job, CASE.protected_from)
        stores.process.send_signal(signal.SIGSTOP)
        await_step(run, job, CASE.protected_from + 3)
        time.sleep(2)
        stores.process.send_signal(signal.SIGCONT)
        job.wait().check()
    assert digest_differences(run._digest(), uninterrupted(CASE)) == []
    assert events_of(run, EventName.FAULT_DETECTED, None) == []
