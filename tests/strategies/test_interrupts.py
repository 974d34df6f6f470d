# SPDX-License-Identifier: Apache-2.0
"""After Ctrl-C nothing of a job is left: no process, no listening socket, no file."""

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import time
import uuid
from pathlib import Path
from random import Random

import psutil
import pytest

from megatron_moevement.errors import ExitCode
from megatron_moevement.runtime.observation.events import EventName, read_events
from tests.harness.interruption import Run, send
from tests.harness.protected_run import Case
from tests.harness.restarted_run import (
    RESTARTABLE,
    await_step,
    events_of,
    restartable_program,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("interrupted_pretrain.py")
CASE = Case.of("pp2-ep2 bf16 distributed grouped", 3)
INTERRUPTED = 130
STEP = CASE.protected_from + 1
MARK = "MOEVEMENT_TEST_MARK"
LISTENING = "0A"
"""As /proc/net/tcp writes the state of a socket."""


def test_ctrl_c_in_training_leaves_no_file(megatron_fork_server, text, tmp_path):
    run = Run(restartable_program(CASE, megatron_fork_server, text, 1), tmp_path)
    with run.start("--moevement-faults", "1:after-barrier@0#7") as job:
        await_step(run, job, 2)
        send(job, signal.SIGINT, range(5))
        result = job.wait()
    assert result.exit_codes == (INTERRUPTED,) * 5, result.describe()
    assert "Traceback" not in "".join(rank.stderr for rank in result.ranks)
    assert list(run.store.rglob("*")) == []


def test_a_process_that_would_restart_instead_leaves_its_rank_to_a_spare(
    megatron_fork_server, text, tmp_path
):
    program = restartable_program(CASE, megatron_fork_server, text, 1, "--cut=1,leave")
    run = Run(dataclasses.replace(program, path=PROGRAM), tmp_path)
    with run.start() as job:
        await_step(run, job, STEP)
        send(job, signal.SIGINT, [1])
        result = job.wait()
    assert result.exit_codes == (0, INTERRUPTED, 0, 0, 0), result.describe()
    assert run._digest()["iteration"] == CASE.train_iters


@pytest.mark.slow
def test_a_process_that_restarts_instead_leaves_no_file(megatron_fork_server, text, tmp_path):
    program = restartable_program(CASE, megatron_fork_server, text, 1, "--cut=1,restart")
    run = Run(dataclasses.replace(program, path=PROGRAM), tmp_path)
    with run.start() as job:
        await_step(run, job, STEP)
        send(job, signal.SIGINT, range(5))
        result = job.wait()
    assert result.exit_codes == (INTERRUPTED,) * 5, result.describe()
    assert "launch the job again" not in "".join(rank.stderr for rank in result.ranks)
    assert list(run.store.rglob("*")) == []
    assert list(run.checkpoints.rglob("process-*")) == []


@pytest.mark.slow
def test_ctrl_c_as_the_store_is_removed_at_the_end_leaves_no_file(
    megatron_fork_server, text, tmp_path
):
    program = restartable_program(CASE, megatron_fork_server, text, 0, "--cut=1,end")
    run = Run(dataclasses.replace(program, path=PROGRAM), tmp_path)
    with run.start() as job:
        result = job.wait()
    assert result.exit_codes == (0, INTERRUPTED, 0, 0), result.describe()
    assert "Traceback" not in "".join(rank.stderr for rank in result.ranks)
    assert list(run.store.rglob("*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_ctrl_c_at_any_time_after_a_fault_leaves_no_file(
    megatron_fork_server, text, tmp_path, seed
):
    random = Random(seed)
    run = Run(restartable_program(CASE, megatron_fork_server, text, 1), tmp_path)
    with run.start("--moevement-faults", f"{STEP}:prepare@{random.randrange(4)}") as job:
        while not events_of(run, EventName.FAULT_INJECTED, 0):
            job.poll()
        time.sleep(random.uniform(0, 1.5))
        send(job, signal.SIGINT, range(5))
        result = job.wait()
    assert sorted(result.exit_codes) == [-9, *[INTERRUPTED] * 4], result.describe()
    assert list(run.store.rglob("*")) == []


class LocalJob:
    """A job of run_local.sh, the ranks of which are found by a mark in their environment."""

    def __init__(self, folder, store, flags, spares):
        self.mark = uuid.uuid4().hex
        self.store = store
        self.events = folder / "events"
        self.output = folder / "output"
        own = (f"--moevement-store-dir={self.store}", f"--moevement-event-dir={self.events}")
        command = [ROOT / "scripts" / "run_local.sh", "-n", "4", "-s", str(spares), "--"]
        with self.output.open("wb") as output:
            self.launcher = subprocess.Popen(
                [*command, *flags, *own],
                env={**os.environ, MARK: self.mark},
                stdout=output,
                stderr=output,
            )

    def processes(self):
        found = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.is_running():
                    found.add(process.pid)
        return found

    def listening(self):
        """Returns the ports at which processes of the job listen."""
        ports = set()
        for pid in self.processes():
            with contextlib.suppress(psutil.Error):
                ports |= {
                    one.laddr.port
                    for one in psutil.Process(pid).net_connections("tcp")
                    if one.status == psutil.CONN_LISTEN
                }
        return ports

    def await_event(self, name, generation, iteration=0):
        while not any(
            (event.event, event.generation) == (name, generation) and event.iteration >= iteration
            for event in (read_events(self.events) if self.events.exists() else [])
        ):
            assert self.launcher.poll() is None, self.output.read_text()
            time.sleep(0.02)

    def interrupt(self):
        """Presses Ctrl-C; returns the exit code of the launcher."""
        self.launcher.send_signal(signal.SIGINT)
        return self.launcher.wait(60)

    def kill(self):
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.launcher.wait()


@pytest.fixture
def start(text, tmp_path):
    """Starts jobs of one run; whatever is left of them is removed."""
    started = []
    store = Path(f"/dev/shm/moevement-test-{uuid.uuid4().hex}")

    def start_job(*flags, spares=1):
        program = CASE.protected_program(None, text, *RESTARTABLE)
        always = (f"--train-iters={CASE.train_iters}", f"--data-cache-path={tmp_path}/index")
        job = LocalJob(tmp_path, store, (*program.flags, *always, *flags), spares)
        started.append(job)
        return job

    yield start_job
    for job in started:
        job.kill()
    shutil.rmtree(store, ignore_errors=True)


def listening_now():
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    return {int(one[1].split(":")[1], 16) for one in fields if one[3] == LISTENING}


def check_nothing_is_left(job, ports):
    assert job.processes() == set()
    assert ports & listening_now() == set()
    assert list(job.store.rglob("*")) == []
    said = job.output.read_text()
    assert "Traceback" not in said
    assert "launch the job again" not in said


@pytest.mark.slow
def test_ctrl_c_while_ranks_wait_for_each_other_at_the_start_leaves_nothing(start):
    job = start("--inprocess-barrier-timeout=120")
    launcher, ranks, first_monitor = 1, 5, 1
    while len(job.processes()) < launcher + ranks + first_monitor:
        time.sleep(0.02)
    ports = job.listening()
    assert job.interrupt() == INTERRUPTED
    assert job.processes() == set()
    assert ports & listening_now() == set()
    assert list(job.store.rglob("*")) == []


@pytest.mark.slow
def test_ctrl_c_in_training_leaves_nothing(start):
    job = start()
    job.await_event(EventName.ITERATION, 0, STEP)
    ports = job.listening()
    assert len(ports) > 2
    assert job.interrupt() == INTERRUPTED
    check_nothing_is_left(job, ports)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "generation"),
    [
        (EventName.FAULT_INJECTED, 0),
        (EventName.FAULT_DETECTED, 1),
        (EventName.PLAN, 1),
        (EventName.REPLAY, 1),
    ],
)
def test_ctrl_c_in_a_recovery_leaves_nothing(start, name, generation):
    job = start("--moevement-faults", f"{STEP}:prepare@2")
    job.await_event(EventName.ITERATION, 0, STEP - 1)
    ports = job.listening()
    job.await_event(name, generation)
    assert job.interrupt() == INTERRUPTED
    check_nothing_is_left(job, ports)


def hanging(soft_s):
    """Returns flags of a job in which rank 2 hangs for good."""
    limits = {"soft": soft_s, "hard": 210, "heartbeat": 190, "barrier": 220, "completion": 220}
    limits_s = [f"--inprocess-{name}-timeout={limit_s}" for name, limit_s in limits.items()]
    return (*limits_s, f"--moevement-faults=stop:{STEP}:prepare@2")


@pytest.mark.slow
def test_at_ctrl_c_nobody_waits_for_a_rank_that_hangs(megatron_fork_server, text, tmp_path):
    others = [0, 1, 3, 4]
    run = Run(restartable_program(CASE, megatron_fork_server, text, 1, *hanging(200)), tmp_path)
    with run.start() as job:
        while not events_of(run, EventName.FAULT_INJECTED, 0):
            job.poll()
        send(job, signal.SIGINT, others)
        codes = [job.wait_for_rank(rank) for rank in others]
        job.kill(2)
        job.wait()
    assert codes == [INTERRUPTED] * len(others)
    left = {folder.name for folder in run.store.glob("*/process-*")}
    assert left == {"process-2"}  # it lived


@pytest.mark.slow
@pytest.mark.parametrize(("soft_s", "wait_s"), [(200, 0.5), (8, 11)])
def test_ctrl_c_while_a_rank_hangs_leaves_nothing(start, soft_s, wait_s):
    """The others wait for it: in training, or to leave the generation that a hang has ended."""
    job = start(*hanging(soft_s))
    job.await_event(EventName.ITERATION, 0, STEP - 1)
    ports = job.listening()
    job.await_event(EventName.FAULT_INJECTED, 0)
    time.sleep(wait_s)
    assert job.interrupt() == INTERRUPTED
    check_nothing_is_left(job, ports)


@pytest.mark.slow
def test_ctrl_c_in_the_conversion_of_a_relaunch_leaves_nothing(start):
    fault = ("--moevement-faults", f"{STEP}:prepare@2")
    crashed = start(*fault, spares=0)
    assert crashed.launcher.wait() == ExitCode.STATE_FLUSHED
    assert any(crashed.store.rglob("*.ring"))
    job = start(*fault, spares=0)
    job.await_event(EventName.REPLAY, 0)
    ports = job.listening()
    assert job.interrupt() == INTERRUPTED
    check_nothing_is_left(job, ports)
