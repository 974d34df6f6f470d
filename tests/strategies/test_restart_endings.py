"""Who ends, and when the job does: processes that are not healthy, restarts that are too many."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from megatron_moevement.integrations.nvrx.stores import request_restart
from megatron_moevement.runtime.events import EventName
from megatron_moevement.testing.interruption import Run, digest_differences
from megatron_moevement.testing.protected_run import Case, plans_of
from megatron_moevement.testing.restarted_run import (
    await_step,
    control_of,
    events_of,
    generation_of,
    restartable_program,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

CASE = Case.of("pp2-ep2 bf16 distributed grouped", 3)
SMALL = Case.of("vpp2 fp32 replicated no-dropout", 1)
DEAF = Path(__file__).with_name("deaf_monitor_pretrain.py")


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
    assert line.startswith("pretrain_moe.py: process 2 stops: it is not healthy: its store /")
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


def test_a_process_ends_although_its_monitor_reads_nothing(megatron_fork_server, text, tmp_path):
    program = restartable_program(SMALL, megatron_fork_server, text, 0)
    run = Run(dataclasses.replace(program, path=DEAF, train_iters=4, timeout_s=60.0), tmp_path)
    with run.start() as job:
        result = job.wait()
    assert result.exit_codes == (0, 0), result.describe()
