"""A fault in a replay: a stage whose state is whole again goes on from it."""

import dataclasses

import pytest

from megatron_moevement.runtime.observation.events import EventName
from tests.harness.default_run import slow_but
from tests.harness.interruption import Run, digest_differences
from tests.harness.localized_run import LocalizedJob, LocalizedRun, Loss, differences
from tests.harness.protected_run import Case
from tests.harness.restarted_run import events_of, restartable_program

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

TARGET = 11
REACHED = TARGET - 1
"""Behind the last slot of whichever window is the newest that is persisted at the target."""
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
    "tied ends": (
        "pp4-tied",
        first(3, 0, 3),
        later(lost=(1,), scope=(0, 1, 3), replaying=(0, 3), kept={0: 1, 3: 1}),
    ),
}


@pytest.mark.parametrize("name", slow_but(("a neighbour is lost",), CASES))
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
