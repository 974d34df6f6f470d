# SPDX-License-Identifier: Apache-2.0
"""A process is lost while a launch starts: the others do not hang, and a spare takes its place."""

import dataclasses
import signal
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_moevement.runtime.coordination.roll_call import note_gone
from megatron_moevement.runtime.observation.events import EventName
from megatron_moevement.settings.faults import FaultPoint
from tests.harness.default_run import slow_but
from tests.harness.interruption import Run, digest_differences
from tests.harness.protected_run import Case, plans_of
from tests.harness.restarted_run import control_of, events_of, restartable_program

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).with_name("starting_pretrain.py")
LAUNCHER = Path(__file__).parents[2] / "scripts" / "run_local.sh"
PLACES = (
    "imports",
    "roll",
    "monitor",
    "barrier",
    "counted",
    "state",
    "key",
    "unwatched",
    "unsaid",
    "watched",
)
CASE = dataclasses.replace(Case.of("vpp2 fp32 replicated no-dropout", 2), replicas=1, deaths=1)
RANKS = CASE.combination.world_size
DEATHS = [f"{place}:{process}" for place in PLACES for process in range(RANKS + 1)]
"""The first process reads for the others who takes part."""
KILLED, STATE_FLUSHED = -signal.SIGKILL, 75
PATIENCE = ("--inprocess-barrier-timeout=250", "--inprocess-completion-timeout=250")
"""Longer than the test: nobody gets on by waiting."""


def await_death(job, process):
    """Waits until a process has died, and notes it as the launcher does."""
    host, port = control_of(job)
    job.wait_for_rank(process)
    store = dist.TCPStore(host, port, None, False, timedelta(seconds=30))
    note_gone(store, process, job.secret)


def start_and_lose(server, text, folder, place, process, spares, *flags):
    """Runs a job of which a process dies in its start; returns the run and how it ended."""
    program = restartable_program(
        CASE, server, text, spares, *PATIENCE, f"--dies-at={place}:{process}", *flags
    )
    run = Run(dataclasses.replace(program, path=PROGRAM, timeout_s=150), folder)
    with run.start() as job:
        await_death(job, process)
        result = job.wait()
    return run, result


@pytest.mark.parametrize("death", slow_but(("key:0",), DEATHS))
def test_a_spare_takes_the_place_of_who_dies_in_the_start(
    megatron_fork_server, text, uninterrupted, tmp_path, death
):
    place, process = death.split(":")[0], int(death.split(":")[1])
    run, result = start_and_lose(megatron_fork_server, text, tmp_path, place, process, spares=1)
    codes = [KILLED if each == process else 0 for each in range(RANKS + 1)]
    assert list(result.exit_codes) == codes, result.describe()
    assert digest_differences(run._digest(), uninterrupted(CASE)) == []
    assert list(run.store.rglob("*")) == []


def test_who_is_killed_when_the_job_is_done_leaves_nothing(megatron_fork_server, text, tmp_path):
    run, result = start_and_lose(megatron_fork_server, text, tmp_path, "end", 1, spares=1)
    assert list(result.exit_codes) == [0, KILLED, 0], result.describe()
    assert list(run.store.rglob("*")) == []


def test_a_process_that_is_lost_when_all_are_done_ends_the_job_for_nobody(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    run, result = start_and_lose(megatron_fork_server, text, tmp_path, "done", 1, spares=1)
    assert list(result.exit_codes) == [0, KILLED, 0], result.describe()
    assert digest_differences(run._digest(), uninterrupted(CASE)) == []
    assert list(run.store.rglob("*")) == []


def test_a_spare_stops_with_the_ranks_that_have_trained_when_the_job_stops_before_its_end(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    fault = f"exception:{CASE.protected_from + 2}:forward@0"
    flags = ("--inprocess-max-iterations=1", "--moevement-faults", fault)
    run, result = start_and_lose(megatron_fork_server, text, tmp_path, "awaited", 1, 1, *flags)
    assert list(result.exit_codes) == [STATE_FLUSHED, KILLED, STATE_FLUSHED], result.describe()
    run._program = restartable_program(CASE, megatron_fork_server, text, 1)
    with run.start() as job:
        again = job.wait()
    assert list(again.exit_codes) == [0, 0, 0], again.describe()
    assert digest_differences(run._digest(), uninterrupted(CASE)) == []
    assert list(run.store.rglob("*")) == []


@pytest.mark.slow
def test_the_launcher_lets_the_others_know_who_died_in_the_start(text, tmp_path):
    program = restartable_program(CASE, None, text, 1, *PATIENCE, "--dies-at=imports:1")
    flags = [*program.flags, "--train-iters=3", f"--data-cache-path={tmp_path / 'index'}"]
    flags += ["--lr-warmup-iters=0", f"--moevement-store-dir={tmp_path / 'store'}"]
    command = [LAUNCHER, "-n", str(RANKS), "-s", "1", "--program", PROGRAM, "--", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
    assert ended.returncode == 0, ended.stderr
    assert "iteration 3 of 3 is trained" in ended.stderr
    assert "in spite of what was lost: process 1 was killed by SIGKILL" in ended.stderr


@pytest.mark.slow
def test_without_a_spare_the_others_say_so_and_end(megatron_fork_server, text, tmp_path):
    _, result = start_and_lose(megatron_fork_server, text, tmp_path, "barrier", 1, spares=0)
    assert list(result.exit_codes) == [1, KILLED], result.describe()
    (line,) = [line for line in result.ranks[0].stderr.splitlines() if "stops" in line]
    assert "the job needs 2 processes and has 1" in line


@pytest.mark.slow
@pytest.mark.parametrize("place", ["imports", "counted", "unsaid"])
def test_who_dies_in_the_start_of_a_relaunch_takes_no_step_along(
    megatron_fork_server, text, uninterrupted, tmp_path, place
):
    step = CASE.protected_from + 2
    program = restartable_program(CASE, megatron_fork_server, text, 0, *PATIENCE)
    run = Run(program, tmp_path)
    with run.start("--moevement-faults", f"{step}:{FaultPoint.BACKWARD.value}") as job:
        assert set(job.wait().exit_codes) <= {KILLED, STATE_FLUSHED}
    flags = (*program.flags, f"--dies-at={place}:1")
    run._program = dataclasses.replace(program, path=PROGRAM, world_size=RANKS + 1, flags=flags)
    with run.start() as job:
        await_death(job, 1)
        result = job.wait()
    assert list(result.exit_codes) == [0, KILLED, 0], result.describe()
    assert digest_differences(run._digest(), uninterrupted(CASE)) == []
    assert plans_of(run)[-1]["target"] == step - 1
    assert not events_of(run, EventName.PLAN, 1)
    assert list(run.store.rglob("*")) == []
