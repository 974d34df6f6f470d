# SPDX-License-Identifier: Apache-2.0
"""A slot that is damaged in its own ring before its copies are made: nobody waits for them."""

import dataclasses
from pathlib import Path

import pytest

from megatron_moevement.runtime.observation.events import EventName
from tests.harness.fault_cover import UNTIED
from tests.harness.interruption import Run, digest_differences
from tests.harness.protected_run import Case
from tests.harness.restarted_run import events_of, restartable_program

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).with_name("troubled_pretrain.py")
SHAPE = (UNTIED, "--expert-model-parallel-size=1")
OTHER = "pp1.dp0.tp0.cp0.ep0"
LINE = "slot 1 of pp0.dp0.tp0.cp0.ep0, of step 7, is damaged in the memory of its own process"


def troubled(program, spares=0):
    return dataclasses.replace(program, path=PROGRAM, world_size=2 + spares)


@pytest.fixture
def case():
    return dataclasses.replace(Case.of("pp2-ep2 bf16 distributed grouped", 3), replicas=1, deaths=1)


def test_the_state_stands_and_no_process_is_lost(case, megatron_fork_server, text, tmp_path):
    program = restartable_program(
        case,
        megatron_fork_server,
        text,
        0,
        *SHAPE,
        "--inprocess-active-world-size=2",
        "--flip=0:7",
    )
    run = Run(troubled(program), tmp_path / "protected")
    with run.start() as job:
        result = job.wait()
    assert result.exit_codes == (0, 0), result.describe()
    assert LINE in result.ranks[0].stderr
    plans = events_of(run, EventName.PLAN, 1)
    assert {plan.fields["verdict"] for plan in plans} <= {"RESUME", "LOCALIZED"}
    assert not events_of(run, EventName.PLAN, 2)
    last = case.train_iters // 3 * 3 - 3
    persisted = {one.fields["start"] for one in events_of(run, EventName.WINDOW_PERSISTED, 1)}
    assert last in persisted
    plain = dataclasses.replace(case.program(megatron_fork_server, text, *SHAPE), world_size=2)
    digest = Run(plain, tmp_path / "plain").finish()
    assert digest_differences(run._digest(), digest) == []


@pytest.mark.slow
def test_without_restarts_the_job_ends_with_a_line_and_goes_on_when_it_is_launched_again(
    case, megatron_fork_server, text, tmp_path
):
    program = case.protected_program(megatron_fork_server, text, *SHAPE)
    run = Run(troubled(program), tmp_path)
    with run.start("--flip=0:7") as job:
        result = job.wait()
    assert result.exit_codes[0] == 75, result.describe()
    assert result.exit_codes[1] not in (0, None), result.describe()
    assert LINE in result.describe()
    assert "launch the job again to go on" in result.describe()
    newest = max(event.iteration for event in events_of(run, EventName.ITERATION, None))
    with run.start() as job:
        job.wait().check()
    targets = {plan.iteration for plan in events_of(run, EventName.PLAN, None)}
    assert targets <= {newest, newest + 1}
    assert targets


def test_a_copy_that_has_changed_is_found_in_training(case, megatron_fork_server, text, tmp_path):
    program = case.protected_program(megatron_fork_server, text, *SHAPE)
    run = Run(troubled(program), tmp_path)
    with run.start("--rot=0:3") as job:
        result = job.wait().check()
    found = events_of(run, EventName.SLOT_DAMAGED, None)
    assert {(one.logical_rank, one.fields["owner"]) for one in found} == {(0, OTHER)}
    assert min(one.iteration for one in found) >= 3
    assert len({one.iteration for one in found}) == len(found)
    (part,) = found[0].fields["parts"]
    step = found[0].iteration
    line = f"{part} of {OTHER}, of step {step}, is damaged in this process's memory"
    assert line in result.ranks[0].stderr
