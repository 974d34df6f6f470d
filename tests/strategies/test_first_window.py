# SPDX-License-Identifier: Apache-2.0
"""Losses before a first window is persisted: the state that all began with is replayed from."""

import dataclasses

import pytest

from megatron_moevement.runtime.observation.events import EventName
from tests.harness.interruption import Run, digest_differences
from tests.harness.protected_run import Case
from tests.harness.restarted_run import events_of, kill_together, restartable_program

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

CASE = Case.of("vpp2 bf16 distributed", 4)
CASE = dataclasses.replace(CASE, replicas=1, deaths=1)


def check_replay(run, first, target, generation=1):
    """Checks that every rank did the steps [first, target] again, and proved them right."""
    (plan, *others) = events_of(run, EventName.PLAN, generation)
    assert all(other.fields == plan.fields for other in others)
    fields = plan.fields
    assert (fields["verdict"], fields["target"], fields["window"]) == ("GLOBAL", target, None)
    assert (fields["lost_steps"], fields["replayed_steps"]) == (0, target - first + 1)
    for rank in range(CASE.combination.world_size):
        replays = [
            event
            for event in events_of(run, EventName.REPLAY, generation)
            if event.logical_rank == rank
        ]
        assert [event.iteration for event in replays] == list(range(first, target + 1))
        assert all(event.fields["replay_verified"] for event in replays)
        (recovered,) = [
            event
            for event in events_of(run, EventName.RECOVERED, generation)
            if event.logical_rank == rank
        ]
        assert recovered.fields["guarantee"] == "EXACT"
    assert trained_after(run, target) == []


def trained_after(run, target):
    """Returns the steps that were reported as trained again after a plan to a target."""
    (plan, *_) = (
        event for event in events_of(run, EventName.PLAN, None) if event.iteration == target
    )
    return [
        event.iteration
        for event in events_of(run, EventName.ITERATION, None)
        if event.time > plan.time and event.iteration <= target
    ]


def finished(run, faults, codes, *flags):
    """Lets a job be struck, and returns its digest."""
    with run.start(*flags, "--moevement-faults", *faults) as job:
        result = job.wait()
    assert sorted(result.exit_codes) == codes, result.describe()
    return run._digest()


def test_a_loss_in_the_first_window_loses_no_step(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    run = Run(restartable_program(CASE, megatron_fork_server, text, 1), tmp_path)
    digest = finished(run, ["4:backward@1"], [-9, 0, 0])
    check_replay(run, 1, 3)
    assert not events_of(run, EventName.PLAN, 2)
    assert digest_differences(digest, uninterrupted(CASE)) == []


@pytest.mark.slow
def test_a_loss_in_the_first_window_after_a_checkpoint_was_loaded_loses_no_step(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    run = Run(restartable_program(CASE, megatron_fork_server, text, 1), tmp_path)
    run.finish("--exit-interval=5")
    digest = finished(run, ["8:barrier@0"], [-9, 0, 0])
    check_replay(run, 6, 7)
    assert not events_of(run, EventName.PLAN, 2)
    assert digest_differences(digest, uninterrupted(CASE)) == []


@pytest.mark.slow
def test_windows_begin_anew_at_a_checkpoint_that_was_saved_in_the_first_one(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    run = Run(restartable_program(CASE, megatron_fork_server, text, 2), tmp_path)
    faults = ["4:backward@1", "9:backward@0#1"]
    digest = finished(run, faults, [-9, -9, 0, 0], "--save-interval=2")
    check_replay(run, 3, 3)
    (again, *_) = events_of(run, EventName.PLAN, 2)
    assert (again.fields["lost_steps"], again.fields["target"]) == (0, 8)
    persisted = [event.fields["start"] for event in events_of(run, EventName.WINDOW_PERSISTED, 2)]
    assert persisted
    assert {start % CASE.window for start in persisted} <= {0, 2}
    assert digest_differences(digest, uninterrupted(CASE)) == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["0:open@1#1", "1:replay@0#1", "2:replay@1#1", "3:barrier@0#1"])
def test_a_loss_in_the_replay_from_the_start_loses_no_step_either(
    megatron_fork_server, text, uninterrupted, tmp_path, fault
):
    run = Run(restartable_program(CASE, megatron_fork_server, text, 2), tmp_path)
    digest = finished(run, ["4:backward@1", fault], [-9, -9, 0, 0])
    check_replay(run, 1, 3, generation=2)
    assert digest_differences(digest, uninterrupted(CASE)) == []


@pytest.mark.slow
def test_all_that_were_killed_in_the_first_window_are_launched_again_and_lose_no_step(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    run = Run(CASE.protected_program(megatron_fork_server, text), tmp_path)
    result = kill_together(run, "4:barrier")
    assert set(result.exit_codes) == {-9}, result.describe()
    digest = run.finish()
    check_replay(run, 1, 3, generation=0)
    assert digest_differences(digest, uninterrupted(CASE)) == []
