# SPDX-License-Identifier: Apache-2.0
"""A process that dies while a checkpoint is written beside training costs that checkpoint alone."""

import dataclasses
import time
from pathlib import Path

import pytest

from megatron_moevement.runtime.observation.events import EventName
from megatron_moevement.training.checkpoints import CheckpointFolder
from tests.harness.interruption import Run, digest_differences, kill_all
from tests.harness.protected_run import Case
from tests.harness.restarted_run import events_of, restartable_program

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

CASE = Case.of("vpp2", 2)
HELD_SAVE = Path(__file__).with_name("held_save_pretrain.py")
INTERVAL = 6
HELD, STRUCK = 6, 12


def held(program, iteration):
    return dataclasses.replace(program, path=HELD_SAVE, env={"HELD_SAVE": str(iteration)})


def saves(run):
    return CheckpointFolder(run.checkpoints)


def left(run):
    return [path.name for path in (run.checkpoints / "moevement").glob("*.writing")]


def test_kills_while_it_is_written_and_before_it_is_named_lose_no_step(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    faults = (f"{HELD + 2}:forward@1", f"{STRUCK}:save@0#1")
    flags = ("--async-save", f"--save-interval={INTERVAL}", "--moevement-faults", *faults)
    program = restartable_program(CASE, megatron_fork_server, text, 2, *flags)
    run = Run(held(program, HELD), tmp_path)
    with run.start() as job:
        result = job.wait()
    assert sorted(result.exit_codes) == [-9, -9, 0, 0], result.describe()
    assert digest_differences(run._digest(), uninterrupted(CASE)) == []
    assert events_of(run, EventName.CHECKPOINT_FAILED, None) == []
    begun = {one.iteration for one in events_of(run, EventName.CHECKPOINT_BEGUN, None)}
    assert {HELD, STRUCK} < begun
    folder = saves(run)
    expected = [k for k in begun if k not in {HELD, STRUCK}]
    assert folder.iterations() == sorted({*expected, CASE.train_iters}, reverse=True)
    assert {folder.damage(k) for k in folder.iterations()} == {None}
    assert left(run) == []


def test_a_killed_job_goes_on_from_the_checkpoint_before_it(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    flags = ("--async-save", "--save-interval=2")
    program = CASE.program(megatron_fork_server, text, *flags)
    run = Run(held(program, 4), tmp_path)
    with run.start() as job:
        while len(list(run.checkpoints.glob("moevement/*4.writing/__*"))) < 2:
            job.poll()
            assert not job.has_ended
            time.sleep(0.01)
        kill_all(job, CASE.combination.world_size)
    assert (saves(run).iterations(), left(run)) == ([2], ["iter_0000004.writing"])
    run = Run(program, tmp_path)
    assert digest_differences(run.finish(), uninterrupted(CASE)) == []
    steps = events_of(run, EventName.ITERATION, None)
    assert min(one.iteration for one in steps if one.pid == steps[-1].pid) == 3
    assert saves(run).latest() == CASE.train_iters
    assert left(run) == []
