# SPDX-License-Identifier: Apache-2.0
"""A wrong state is never called the same and never trained on, though nothing wrong was sent."""

import dataclasses
import re
from pathlib import Path
from random import Random

import pytest

from megatron_moevement.runtime.observation.events import EventName, read_events
from tests.harness.default_run import slow_but
from tests.harness.fork_server import JobFailedError
from tests.harness.interruption import Run, digest_differences
from tests.harness.localized_run import TARGET, LocalizedJob, LocalizedRun, Loss
from tests.harness.protected_run import Case
from tests.harness.restarted_run import (
    await_step,
    events_of,
    kill_rank,
    restartable_program,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).with_name("mutated_pretrain.py")
UNTIED = "--untie-embeddings-and-output-weights"
PP2 = "--expert-model-parallel-size=1"
STAGES = LocalizedJob.of("pp2-ep2 bf16 replicated bias", 2, 2, 6, UNTIED, PP2)
ONE_STAGE = LocalizedJob.of("pp2-ep2 fp32 distributed", 2, 1, 3, "--pipeline-model-parallel-size=1")
NEXT = f"{TARGET + 1}:prepare"
LOCALIZED = Loss((0,), (0,), everybody=NEXT)
GLOBAL = Loss((0,), (0,), everybody=NEXT, verdict="GLOBAL")
CASES = {
    "moments, one stage alone": ("scale-last-moments", STAGES, LOCALIZED, "states"),
    "moments, all stages": ("scale-last-moments", ONE_STAGE, GLOBAL, "states"),
    "update, one stage alone": ("update-wrongly-at-last", STAGES, LOCALIZED, "slots"),
    "update, all stages": ("update-wrongly-at-last", ONE_STAGE, GLOBAL, "slots"),
    "copy, one stage alone": ("fetch-bad-copy", STAGES, LOCALIZED, "states"),
}
DIFFERS = "UnprovenStateError: the replay up to step 9 differs from the first time on pp0"


@pytest.mark.parametrize(
    "name", slow_but(("moments, one stage alone", "update, all stages"), CASES)
)
def test_the_job_stops(megatron_fork_server, text, tmp_path, name):
    mutation, job, loss, kind = CASES[name]
    run = LocalizedRun(megatron_fork_server, job, text, TARGET + 3, tmp_path)
    with pytest.raises(JobFailedError, match=DIFFERS):
        run.train([loss], "--moevement-replicas=1", mutation=mutation)
    events = read_events(run.folder / "events")
    assert not any(event.event is EventName.RECOVERED for event in events)
    differed = [event for event in events if event.event is EventName.REPLAY_DIFFERED]
    assert {event.fields["consequence"] for event in differed} == {"stop"}
    counted = {"states": "state", "slots": "slot"}[kind]
    assert all(f"{counted}" in event.fields["proof"] for event in differed)
    assert all("UNEQUAL" in event.fields["proof"] for event in differed)
    trained = [event for event in events if event.event is EventName.ITERATION]
    assert max(event.iteration for event in trained) <= TARGET


REAL = Case.of("pp2-ep2 bf16 distributed grouped", 3)


def mutated(program, mutation):
    flags = (f"--mutation={mutation}", *program.flags)
    return dataclasses.replace(program, path=PROGRAM, flags=flags)


@pytest.mark.slow
def test_a_replay_from_a_bad_copy_is_done_again_from_another_one(
    megatron_fork_server, text, tmp_path
):
    plain_program = REAL.program(megatron_fork_server, text, UNTIED)
    expected = Run(plain_program, tmp_path / "plain").finish()
    program = restartable_program(
        REAL, megatron_fork_server, text, 1, UNTIED, "--moevement-replicas=2"
    )
    run = Run(mutated(program, "fetch-bad-copy"), tmp_path / "killed")
    with run.start() as job:
        await_step(run, job, REAL.protected_from)
        kill_rank(run, job, 2, Random(1))
        result = job.wait()
    assert sorted(result.exit_codes) == [-9, 0, 0, 0, 0], result.describe()
    assert digest_differences(run._digest(), expected) == []
    differed = events_of(run, EventName.REPLAY_DIFFERED, 1)
    assert {event.fields["consequence"] for event in differed} == {"again"}
    assert events_of(run, EventName.RECOVERED, 1) == []
    for event in events_of(run, EventName.RECOVERED, 2):
        assert event.fields["guarantee"] == "EXACT"
        assert event.fields["replay_verified"] is not False


@pytest.mark.slow
def test_a_real_job_ends_with_75_and_keeps_its_memory(megatron_fork_server, text, tmp_path):
    program = restartable_program(
        REAL, megatron_fork_server, text, 1, UNTIED, "--moevement-replicas=1"
    )
    run = Run(mutated(program, "scale-last-moments"), tmp_path)
    with run.start() as job:
        await_step(run, job, REAL.protected_from)
        kill_rank(run, job, 2, Random(1))
        result = job.wait()
    assert sorted(result.exit_codes)[:1] == [-9], result.describe()
    assert set(sorted(result.exit_codes)[1:]) == {75}, result.describe()
    says = result.describe()
    assert "differs from the first time on pp1" in says
    assert "launch the job again to go on" in says
    assert len(list((run.checkpoints / "moevement" / "flushed").glob("*/process-*"))) == 4


@pytest.mark.slow
def test_a_wrong_update_that_nothing_is_left_to_compare_with_is_not_called_exact(
    megatron_fork_server, text, tmp_path
):
    program = restartable_program(
        REAL, megatron_fork_server, text, 2, UNTIED, "--moevement-replicas=2"
    )
    run = Run(mutated(program, "update-wrongly-at-last"), tmp_path)
    with run.start("--moevement-faults", f"{REAL.protected_from}:committed@2,3") as job:
        result = job.wait()
    assert sorted(result.exit_codes) == [-9, -9, 0, 0, 0, 0], result.describe()
    (line,) = re.findall(r"generation 1: .*", "".join(rank.stderr for rank in result.ranks))
    assert "guarantee EXACT but for the final state of" in line
