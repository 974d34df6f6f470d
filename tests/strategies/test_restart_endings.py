# SPDX-License-Identifier: Apache-2.0
"""Who ends, and when the job does: processes that are not healthy, restarts that are too many."""

import dataclasses
import re
import shutil
import signal
from pathlib import Path

import pytest

from megatron_moevement.integrations.nvrx.control_store import request_restart
from megatron_moevement.runtime.observation.events import EventName
from tests.harness.interruption import Run, digest_differences, send
from tests.harness.protected_run import Case, plans_of
from tests.harness.restarted_run import (
    await_step,
    control_of,
    events_of,
    generation_of,
    restartable_program,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

CASE = Case.of("pp2-ep2 bf16 distributed grouped", 3)
SMALL = dataclasses.replace(Case.of("vpp2 fp32 replicated no-dropout", 1), deaths=1)
DEAF = Path(__file__).with_name("deaf_monitor_pretrain.py")
LATE = Path(__file__).with_name("late_watchdog_pretrain.py")


def lose_store(run, process):
    """Removes what a process keeps, and restarts; returns how the job ended."""
    with run.start() as job:
        await_step(run, job, CASE.protected_from)
        (folder,) = run.store.glob(f"*/process-{process}")
        shutil.rmtree(folder)
        request_restart(control_of(job), generation_of(run), job.secret)
        return job.wait()


@pytest.mark.slow
def test_a_survivor_that_lost_its_store_gives_its_place_to_a_spare(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    run = Run(restartable_program(CASE, megatron_fork_server, text, 1), tmp_path)
    result = lose_store(run, process=2)
    assert result.exit_codes[2] != 0
    assert [code for process, code in enumerate(result.exit_codes) if process != 2] == [0] * 4
    (line,) = [line for line in result.ranks[2].stderr.splitlines() if "not healthy" in line]
    assert " ERROR pretrain_moe.py: process 2 stops: it is not healthy: its store /" in line
    assert "process-2 can't be written: No such file or directory" in line
    assert "Traceback" not in result.ranks[2].stderr
    assert digest_differences(run._digest(), uninterrupted(CASE)) == []
    plans = events_of(run, EventName.PLAN, 1)
    assert {plan.fields["verdict"] for plan in plans} == {"GLOBAL"}


@pytest.mark.slow
def test_without_a_spare_the_others_keep_their_state(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    run = Run(restartable_program(CASE, megatron_fork_server, text, 0), tmp_path)
    result = lose_store(run, process=2)
    assert result.exit_codes == (75, 75, 1, 75), result.describe()
    assert digest_differences(run.finish(), uninterrupted(CASE)) == []
    assert plans_of(run)[-1]["verdict"] == "GLOBAL"


def test_a_spare_that_is_left_alone_says_that_it_has_nothing(megatron_fork_server, text, tmp_path):
    """What the dead kept is lost with their machines; a launch finds nothing that it could name."""
    flags = ("--moevement-replicas=0",)
    run = Run(restartable_program(SMALL, megatron_fork_server, text, 1, *flags), tmp_path)
    with run.start() as job:
        await_step(run, job, SMALL.protected_from)
        ranks = range(SMALL.combination.world_size)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            send(job, number, ranks)
        for rank in ranks:
            job.wait_for_rank(rank)
            for folder in run.store.glob(f"*/process-{rank}"):
                shutil.rmtree(folder)
        result = job.wait()
    assert result.exit_codes == (*(-signal.SIGKILL for _ in ranks), 1), result.describe()
    (line,) = [one for one in result.ranks[-1].stderr.splitlines() if "stops" in one]
    assert re.search(
        r"and has 1, after \S+ lost \d processes .*; it keeps no state of the job", line
    )


@pytest.mark.slow
def test_as_many_restarts_as_the_flag_says_and_a_relaunch_loses_nothing(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    run = Run(restartable_program(CASE, megatron_fork_server, text, 1), tmp_path)
    with run.start("--inprocess-max-iterations=1") as job:
        await_step(run, job, CASE.protected_from)
        request_restart(control_of(job), 0, job.secret)
        while generation_of(run) == 0:
            job.poll()
        request_restart(control_of(job), 1, job.secret)
        result = job.wait()
    assert result.exit_codes == (75,) * 5, result.describe()  # a spare keeps its copies, too
    stops = [line for rank in result.ranks for line in rank.stderr.splitlines() if "stops" in line]
    assert len(stops) == 5
    assert all("--inprocess-max-iterations 1 is reached" in line for line in stops)
    assert generation_of(run) == 1
    assert digest_differences(run.finish(), uninterrupted(CASE)) == []


@pytest.mark.parametrize("path", [DEAF, LATE], ids=["monitor reads nothing", "watchdog is late"])
def test_a_process_ends_whatever_watches_it_does(path, megatron_fork_server, text, tmp_path):
    program = restartable_program(SMALL, megatron_fork_server, text, 0)
    run = Run(dataclasses.replace(program, path=path, train_iters=4, timeout_s=60.0), tmp_path)
    with run.start() as job:
        result = job.wait()
    assert result.exit_codes == (0, 0), result.describe()
