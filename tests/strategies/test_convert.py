# SPDX-License-Identifier: Apache-2.0
"""What killed jobs left in memory becomes a checkpoint that needs no strategy."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from megatron_moevement.runtime.stores.store import LOCK_NAME
from tests.harness.interruption import Run, digest_differences, kill_all
from tests.harness.log_lines import log_lines
from tests.harness.protected_run import Case, check_replays, plans_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
CASE = Case.of("vpp2 fp16 distributed grouped bias", 3)
SHARDED = dataclasses.replace(Case.of("edp3 bf16 distributed-overlap linear", 2), deaths=1)
LONG = Case.of("vpp2 fp16 distributed grouped", 20)
CONVERT = "--moevement-recover-only"


def killed(server, text, folder, case, *flags):
    run = Run(case.protected_program(server, text, *flags), folder)
    run.kill(case.protected_from + 1, Random(0))
    assert saved_in(run.checkpoints) == []
    return run


def saved_in(folder):
    return sorted(path.name for path in folder.glob("iter_*"))


def everything_in(folder):
    """Returns the size of each file, without locks, which name who had them open last."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != LOCK_NAME)
    return {path: path.stat().st_size for path in files}


def refused(run, *flags):
    """Returns the only line that a conversion says before it fails with exit code 2."""
    with run.start(CONVERT, *flags) as job:
        result = job.wait()
    assert set(result.exit_codes) == {2}
    return [line.text for rank in result.ranks for line in log_lines(rank.stderr)][-1]


@pytest.mark.parametrize(
    "case",
    [SHARDED, pytest.param(CASE, marks=pytest.mark.slow)],
    ids=lambda case: case.name,
)
def test_the_checkpoint_leads_to_the_bits_of_an_uninterrupted_run(
    megatron_fork_server, text, uninterrupted, tmp_path, case
):
    run = killed(megatron_fork_server, text, tmp_path, case)
    store = everything_in(run.store)
    converted = run.finish(CONVERT)
    check_replays(run, case, launches=1)
    target = plans_of(run)[0]["target"]
    assert saved_in(run.checkpoints) == [f"iter_{target:07d}"]
    assert converted["iteration"] == target < case.train_iters
    assert everything_in(run.store) == store
    finished = run.finish("--moevement-strategy=off")
    assert digest_differences(finished, uninterrupted(case)) == []


@pytest.mark.slow
def test_a_job_goes_on_from_memory_after_it_was_converted(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    run = killed(megatron_fork_server, text, tmp_path, CASE)
    for _ in range(2):
        run.finish(CONVERT, f"--save={tmp_path}/elsewhere")
    assert saved_in(run.checkpoints) == []
    assert digest_differences(run.finish(), uninterrupted(CASE)) == []
    check_replays(run, CASE, launches=3)
    assert everything_in(run.store) == {}


@pytest.mark.slow
def test_the_state_of_the_last_step_is_converted(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    """The job dies in the evaluation after the last step, and its checkpoint is lost."""
    run = Run(CASE.protected_program(megatron_fork_server, text), tmp_path)
    with run.start(f"--save={tmp_path}/lost", "--eval-iters=60") as job:
        job.wait_for_output(1, f"iteration {CASE.train_iters:8d}/")
        kill_all(job, CASE.combination.world_size)
    converted = run.finish(CONVERT)
    assert digest_differences(converted, uninterrupted(CASE)) == []
    assert saved_in(run.checkpoints) == [f"iter_{CASE.train_iters:07d}"]


def test_where_nothing_is_left_nothing_is_written(megatron_fork_server, text, tmp_path):
    run = Run(CASE.protected_program(megatron_fork_server, text), tmp_path)
    assert "the processes of such a job left no window in memory" in refused(run)
    assert not run.checkpoints.exists()
    assert everything_in(run.store) == {}


def test_memory_before_the_first_window_is_no_state_and_stays(megatron_fork_server, text, tmp_path):
    run = Run(LONG.protected_program(megatron_fork_server, text), tmp_path)
    run.kill(1, Random(0))
    store = everything_in(run.store)
    assert store
    assert "whole and persisted" in refused(run)
    assert everything_in(run.store) == store
    assert not saved_in(run.checkpoints)


def test_a_checkpoint_as_new_as_the_memory_is_told_of(megatron_fork_server, text, tmp_path):
    run = killed(megatron_fork_server, text, tmp_path, CASE)
    target = run.finish(CONVERT)["iteration"]
    before = everything_in(run.checkpoints)
    assert f"newer than the checkpoint of step {target}" in refused(run)
    assert everything_in(run.checkpoints) == before


@pytest.mark.slow
def test_a_folder_that_can_not_be_written_is_told_of_and_memory_stays(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    run = killed(megatron_fork_server, text, tmp_path, CASE)
    store = everything_in(run.store)
    (tmp_path / "file").write_text("")
    assert f"--save {tmp_path}/file is not writable" in refused(run, f"--save={tmp_path}/file")
    assert everything_in(run.store) == store
    assert digest_differences(run.finish(), uninterrupted(CASE)) == []


@pytest.mark.slow
def test_the_command_starts_the_ranks_of_the_job(megatron_fork_server, text, tmp_path):
    case = Case.of("edp3 fp32", 1)
    run = killed(megatron_fork_server, text, tmp_path, case)
    flags = case.protected_program(megatron_fork_server, text).flags
    command = [
        *(sys.executable, "-m", "megatron_moevement.cli", "convert", "-n", "3", "--json", "--"),
        *(*flags, f"--train-iters={case.train_iters}"),
        *(f"--save={run.checkpoints}", f"--moevement-store-dir={run.store}"),
    ]
    ended = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "successfully saved checkpoint from iteration" in ended.stderr
    (saved,) = saved_in(run.checkpoints)
    document = json.loads(ended.stdout)
    assert document["checkpoint"] == f"{run.checkpoints}/{saved}"
    assert saved == f"iter_{document['step']:07d}"
    written = [path.stat().st_size for path in (run.checkpoints / saved).iterdir()]
    assert (document["files"], document["bytes"]) == (len(written), sum(written))
