# SPDX-License-Identifier: Apache-2.0
"""A strategy that is registered in one file of its own protects a job as well as any other."""

import dataclasses
import signal

import pytest

from megatron_moevement.runtime.observation.events import EventName, read_events
from megatron_moevement.settings.faults import FaultPoint
from tests.harness import toy_strategy
from tests.harness.interruption import Run, digest_differences
from tests.harness.protected_run import Case, die
from tests.harness.restarted_run import check_survivors, events_of, restartable_program

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

CASE = Case.of("edp3 bf16 distributed", 1)
TOY = f"--moevement-strategy={toy_strategy.TOY}"


def with_toy(program):
    return dataclasses.replace(program, path=toy_strategy.__file__, flags=(*program.flags, TOY))


def first_steps(run):
    """Returns the step that each process of rank 0 trained first."""
    steps = {}
    for event in read_events(run.events):
        if (event.event, event.logical_rank) == (EventName.ITERATION, 0):
            steps.setdefault((event.pid, event.generation), event.iteration)
    return list(steps.values())


def test_a_launch_goes_on_from_the_newest_step_of_which_all_ranks_have_a_file(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    run = Run(with_toy(CASE.program(megatron_fork_server, text)), tmp_path)
    die(run, CASE, FaultPoint.BARRIER, [5], ranks=[1])
    die(run, CASE, FaultPoint.GATHER, [8], ranks=[2])
    assert digest_differences(run.finish(), uninterrupted(CASE)) == []
    assert first_steps(run) == [1, 5, 8]
    assert list(run.store.rglob("*.state")) == []


def test_survivors_of_a_killed_process_go_back_with_the_spare_that_takes_its_place(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    program = restartable_program(CASE, megatron_fork_server, text, 1)
    run = Run(with_toy(program), tmp_path)
    with run.start("--moevement-faults", "6:barrier@1") as job:
        result = job.wait()
    assert sorted(result.exit_codes) == [-signal.SIGKILL, 0, 0, 0], result.describe()
    assert digest_differences(run._digest(), uninterrupted(CASE)) == []
    check_survivors(run, [job.pids[rank] for rank in (0, 2)], 1)
    steps = [event.iteration for event in events_of(run, EventName.ITERATION, 1)]
    assert min(steps) == 6
