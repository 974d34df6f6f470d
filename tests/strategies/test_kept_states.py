# SPDX-License-Identifier: Apache-2.0
"""A fault in a replay: a stage goes on from the state that it had reached, partial or dense."""

import dataclasses
import time
from pathlib import Path

import pytest

from megatron_moevement.runtime.observation.events import EventName
from tests.harness.default_run import slow_but
from tests.harness.fork_server import JobFailedError
from tests.harness.interruption import Run, digest_differences
from tests.harness.localized_run import LocalizedJob, LocalizedRun, Loss, differences
from tests.harness.protected_run import Case
from tests.harness.restarted_run import events_of, kill_occupant, restartable_program

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

TARGET = 11
REACHED = TARGET - 1
"""Behind the last slot of the newest window that is persisted at the target."""
START = 6
"""Of that window: the slots of S_7 and of S_8 are put back after replayed steps."""
TRAIN_ITERS = TARGET + 5
"""Until a ring has no more room, unless windows are persisted that hold slots of before."""
UNTIED = "--untie-embeddings-and-output-weights"
PP3 = ("--pipeline-model-parallel-size=3", "--num-layers=3", "--expert-model-parallel-size=1")
PP4 = ("--pipeline-model-parallel-size=4", "--num-layers=4", "--expert-model-parallel-size=1")
JOBS = {
    "pp2-ep2": LocalizedJob.of("pp2-ep2 bf16 distributed-overlap bias", 4, 2, 3, UNTIED),
    "pp3": LocalizedJob.of("pp2-ep2 fp16 replicated-overlap bias", 3, 3, 6, UNTIED, *PP3),
    "pp4-tied": LocalizedJob.of("pp2-ep2 fp32 replicated", 4, 4, 6, *PP4),
}
FIRST = Loss(everybody=f"{TARGET}:gather", target=TARGET)
LATER = Loss(reached=REACHED, target=TARGET)


def first(rank, *scope):
    return dataclasses.replace(FIRST, lost=(rank,), scope=scope)


def later(**changes):
    return dataclasses.replace(LATER, **changes)


CASES = {
    "nobody else is lost": (
        "pp3",
        first(1, 1),
        later(scope=(1,), replaying=(1,), kept={1: 1}),
    ),
    "a neighbour is lost": (
        "pp3",
        first(1, 1),
        later(lost=(2,), scope=(1, 2), replaying=(1,), kept={1: 1}),
    ),
    "a stage far away is lost": (
        "pp3",
        first(0, 0),
        later(lost=(2,), scope=(0, 2), replaying=(0,), kept={0: 1}),
    ),
    "the only other stage is lost": (
        "pp2-ep2",
        first(2, 1),
        later(lost=(0,), scope=(0, 1), replaying=(2, 3), kept={1: 1}, verdict="GLOBAL"),
    ),
    "one of the replaying is lost": (
        "pp2-ep2",
        first(2, 1),
        later(lost=(3,), scope=(1,), replaying=(2, 3)),
    ),
    "one of the replaying is behind": (
        "pp2-ep2",
        first(2, 1),
        later(scope=(1,), replaying=(2, 3), behind=(3,), rolled=1, kept={1: 1}),
    ),
    "torn commit": (
        "pp3",
        first(1, 1),
        later(scope=(1,), replaying=(1,), torn=(1,)),
    ),
    "nobody else is lost, in the conversion": (
        "pp3",
        first(1, 1),
        later(reached=START + 1, scope=(1,), replaying=(1,), kept={1: 4}),
    ),
    "a neighbour is lost, before the last slot": (
        "pp3",
        first(1, 1),
        later(reached=START + 2, lost=(2,), scope=(1, 2), replaying=(1,), kept={1: 3}),
    ),
    "stages far away are lost, one after the other, in the conversion": (
        "pp3",
        first(0, 0),
        later(reached=START + 1, lost=(2,), scope=(0, 2), replaying=(0,), kept={0: 4}),
        later(reached=START + 2, scope=(0, 2), replaying=(0, 2), kept={0: 3, 2: 3}),
    ),
    "one of the replaying is lost, in the conversion": (
        "pp2-ep2",
        first(2, 1),
        later(reached=START + 1, lost=(3,), scope=(1,), replaying=(2, 3)),
    ),
    "one of the replaying is behind, in the conversion": (
        "pp2-ep2",
        first(2, 1),
        later(
            reached=START + 1,
            scope=(1,),
            replaying=(2, 3),
            behind=(3,),
            rolled=1,
            kept={1: 4},
        ),
    ),
    "one of the replaying is behind, before the last slot": (
        "pp2-ep2",
        first(0, 0),
        later(
            reached=START + 2,
            lost=(2,),
            scope=(0, 1),
            replaying=(0, 1),
            behind=(0,),
            rolled=1,
            kept={0: 3},
            verdict="GLOBAL",
        ),
    ),
    "torn commit, in the conversion": (
        "pp2-ep2",
        first(2, 1),
        later(reached=START + 1, scope=(1,), replaying=(2, 3), torn=(3,)),
    ),
    "tied ends, in the conversion": (
        "pp4-tied",
        first(3, 0, 3),
        later(reached=START + 1, lost=(1,), scope=(0, 1, 3), replaying=(0, 3), kept={0: 4, 3: 4}),
    ),
    "tied ends": (
        "pp4-tied",
        first(3, 0, 3),
        later(lost=(1,), scope=(0, 1, 3), replaying=(0, 3), kept={0: 1, 3: 1}),
    ),
}
QUICK = ("one of the replaying is behind, in the conversion",)


@pytest.mark.parametrize("name", slow_but(QUICK, CASES))
def test_a_stage_goes_on_from_where_its_replay_was_interrupted(
    megatron_fork_server, text, tmp_path, name
):
    job, *losses = CASES[name]
    folders = [tmp_path / folder for folder in ("plain", "lost")]
    for folder in folders:
        folder.mkdir()
    plain, run = (
        LocalizedRun(megatron_fork_server, JOBS[job], text, TRAIN_ITERS, folder)
        for folder in folders
    )
    found = run.train(losses, "--moevement-replicas=2")
    assert differences(found, plain.train()) == []
    run.check(losses, found)


REAL = Case.of("pp2-ep2 bf16 distributed grouped", 2)
HELD_PROGRAM = Path(__file__).with_name("held_pretrain.py")


@pytest.mark.slow
def test_an_exception_in_a_replay_costs_no_step_that_was_replayed(
    megatron_fork_server, text, tmp_path
):
    expected = Run(REAL.program(megatron_fork_server, text, UNTIED), tmp_path / "plain").finish()
    program = restartable_program(REAL, megatron_fork_server, text, 1, UNTIED)
    run = Run(program, tmp_path / "faults")
    faults = (f"{TARGET}:gather@2", f"exception:{REACHED}:gather@3#1")
    with run.start("--moevement-faults", *faults) as job:
        result = job.wait()
    assert sorted(result.exit_codes) == [-9, 0, 0, 0, 0], result.describe()
    assert digest_differences(run._digest(), expected) == []
    first, second = (events_of(run, EventName.PLAN, generation)[0].fields for generation in (1, 2))
    assert (first["verdict"], first["scope"]) == ("LOCALIZED", [1])
    assert first["replayed_steps"] > second["replayed_steps"]
    assert second["replayed_steps"] <= 1


HELD = dataclasses.replace(Case.of("pp2-ep2 bf16 replicated-overlap bias", 4), replicas=2)
"""Its flags; it is trained by three stages of one rank each."""
HELD_SLOT = 2
HELD_FLAGS = (*PP3, UNTIED, "--inprocess-active-world-size=3")


def await_file(job, file):
    """Waits until a file is there.

    Raises:
        JobFailedError: the job ended before.
    """
    while not file.exists():
        job.poll()
        if job.has_ended:
            raise JobFailedError(job.wait().describe())
        time.sleep(0.02)


@pytest.mark.slow
def test_a_process_killed_elsewhere_costs_no_step_of_a_window_that_is_converted(
    megatron_fork_server, text, tmp_path
):
    plain = HELD.program(megatron_fork_server, text, *PP3, UNTIED)
    plain = dataclasses.replace(plain, world_size=3)
    expected = Run(plain, tmp_path / "plain").finish()
    file = tmp_path / "held"
    program = restartable_program(
        HELD, megatron_fork_server, text, 2, *HELD_FLAGS, f"--held={HELD_SLOT},{file}"
    )
    program = dataclasses.replace(program, path=HELD_PROGRAM, world_size=5)
    run = Run(program, tmp_path / "faults")
    with run.start("--moevement-faults", f"{TARGET + 2}:gather@0") as job:
        await_file(job, file)
        kill_occupant(run, job, 2)
        result = job.wait()
    assert sorted(result.exit_codes) == [-9, -9, 0, 0, 0], result.describe()
    assert digest_differences(run._digest(), expected) == []
    first, second = (events_of(run, EventName.PLAN, generation)[0].fields for generation in (1, 2))
    assert (first["verdict"], first["scope"]) == ("LOCALIZED", [0])
    assert (second["verdict"], second["scope"]) == ("LOCALIZED", [0, 2])
    start, target = first["window"], first["target"]
    assert (second["window"], second["target"]) == (start, target)
    replays = events_of(run, EventName.REPLAY, None)
    steps = {
        generation: [
            (event.logical_rank, event.iteration)
            for event in replays
            if event.generation == generation
        ]
        for generation in (1, 2)
    }
    reached = start + HELD_SLOT
    assert steps[1] == [(0, step) for step in range(start + 1, reached + 1)]
    assert sorted(steps[2]) == [
        *((0, step) for step in range(reached + 1, target + 1)),
        *((2, step) for step in range(start + 1, target + 1)),
    ]
    assert all(event.fields["replay_verified"] is True for event in replays)
    recovered = {
        event.logical_rank: event.fields for event in events_of(run, EventName.RECOVERED, 2)
    }
    assert recovered[0]["replayed_steps"] == target - reached
    assert [recovered[rank]["replay_verified"] for rank in range(3)] == [True, None, True]
