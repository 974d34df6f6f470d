# SPDX-License-Identifier: Apache-2.0
"""Recoveries over a group that behaves as NCCL's: nothing hangs, and no bit differs.

Some rows of the fault cover run by default; the others are marked slow and run by one command:

    ./scripts/nccl_like_campaign.sh
    ./scripts/nccl_like_campaign.sh -k without    # each mend is taken out, and its job is lost
"""

import dataclasses
import functools
import inspect
import os
import shutil
from pathlib import Path
from random import Random

import pytest

from tests.harness.default_run import slow_but
from tests.harness.fault_cover import ROWS
from tests.harness.fault_cover_run import StruckRun, plain_program, struck_program
from tests.harness.interruption import Run, digest_differences
from tests.harness.losses import CELLS
from tests.harness.losses_run import LossesRun, protected_program
from tests.harness.losses_run import plain_program as losses_plain
from tests.harness.nccl_like.abort import FOLDER_VARIABLE, VARIABLE, Garbage
from tests.harness.protected_run import Case, plans_of
from tests.harness.restarted_run import (
    await_step,
    check_verdicts,
    generation_of,
    kill_rank,
    restartable_program,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

PROGRAM = Path(__file__).with_name("nccl_like_pretrain.py")
WITHOUT = "NCCL_LIKE_WITHOUT"
"""Names a mend that jobs train without."""
PP2_EP2 = dataclasses.replace(Case.of("pp2-ep2 bf16 distributed grouped", 3), deaths=1)
VPP2 = dataclasses.replace(Case.of("vpp2 bf16 distributed", 4), replicas=1, deaths=1)
PP3 = dataclasses.replace(Case.of("edp3 bf16", 2), deaths=1)
STAGES = ("--pipeline-model-parallel-size=3", "--num-layers=3")
IMPATIENT = ("--inprocess-soft-timeout=6", "--inprocess-hard-timeout=9")
GARBAGE = tuple(garbage.value for garbage in Garbage)
PIPELINES = {cell.name: cell for cell in CELLS}
LAYOUTS = ("pp2-ep2", "pp3-dp2")
BY_NAME = {row.name: row for row in ROWS if row.layout in LAYOUTS}
QUICK = next(name for name, row in BY_NAME.items() if row.layout == "pp2-ep2" and row.restarts)


def nccl_like(program, folder, garbage=Garbage.ZEROS, *, neighbours=True, mishap=""):
    noted = folder / "communicators"
    noted.mkdir()
    env = {
        **program.env,
        VARIABLE: f"{garbage.value}{',neighbours' if neighbours else ''}",
        FOLDER_VARIABLE: str(noted),
        "NCCL_LIKE_MISHAP": f"{mishap},{os.environ.get(WITHOUT, '')}",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": "600",
    }
    flags = tuple(flag for flag in program.flags if flag != "--domain-size=1")
    if os.environ.get(WITHOUT):
        flags += IMPATIENT  # with what hangs
    return dataclasses.replace(program, path=PROGRAM, env=env, flags=flags)


@pytest.fixture(scope="session")
def digest_of(megatron_fork_server, text, tmp_path_factory):
    """Returns the digest of a program that nothing protects or strikes, over gloo."""

    @functools.cache
    def digest(plain, trained):
        folder = tmp_path_factory.mktemp("uninterrupted")
        found = Run(plain(trained, megatron_fork_server, text), folder).finish()
        shutil.rmtree(folder)
        return found

    return digest


def train_on(run, *, lost):
    """Checks that all but lost processes have ended well."""
    with run.start() as job:
        lost = lost(job)
        result = job.wait()
    codes = [code for process, code in enumerate(result.exit_codes) if process != lost]
    assert codes == [0] * len(codes), result.describe()


def replace_a_killed_rank(run, uninterrupted):
    """Kills rank 2; checks that a spare takes its place, and all bits."""

    def kill(job):
        await_step(run, job, PP2_EP2.protected_from)
        return kill_rank(run, job, 2, Random(1))

    train_on(run, lost=kill)
    assert digest_differences(run._digest(), uninterrupted(PP2_EP2)) == []
    check_verdicts(run, PP2_EP2, restarts=1)


@pytest.mark.parametrize("garbage", slow_but((Garbage.STALE.value,), GARBAGE))
def test_a_killed_rank_is_replaced_by_a_spare(
    megatron_fork_server, text, uninterrupted, tmp_path, garbage
):
    program = restartable_program(PP2_EP2, megatron_fork_server, text, 1)
    run = Run(nccl_like(program, tmp_path, Garbage(garbage)), tmp_path)
    replace_a_killed_rank(run, uninterrupted)


@pytest.mark.slow
def test_ranks_that_wait_for_a_slow_newcomer_are_not_taken_for_hung(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    program = restartable_program(PP2_EP2, megatron_fork_server, text, 1, *IMPATIENT)
    run = Run(nccl_like(program, tmp_path, mishap="slow-build"), tmp_path)
    replace_a_killed_rank(run, uninterrupted)


@pytest.mark.slow
def test_ranks_that_wait_for_a_slow_one_in_a_save_are_not_taken_for_hung(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    saves = f"--save-interval={PP2_EP2.protected_from}"
    program = restartable_program(PP2_EP2, megatron_fork_server, text, 0, *IMPATIENT, saves)
    run = Run(nccl_like(program, tmp_path, mishap="slow-save"), tmp_path)
    train_on(run, lost=lambda job: None)
    assert generation_of(run) == 0
    assert digest_differences(run._digest(), uninterrupted(PP2_EP2)) == []


def test_adjacent_stages_replay_while_others_of_their_pipeline_stand_by(
    megatron_fork_server, text, digest_of, tmp_path
):
    cell = PIPELINES["adjacent-stages"]
    protected = protected_program(cell, megatron_fork_server, text, PROGRAM)
    run = LossesRun(cell, nccl_like(protected, tmp_path), tmp_path)
    run.go()
    run.check(digest_of(losses_plain, cell))


def test_interleaved_stages_connect_before_they_train(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    program = restartable_program(VPP2, megatron_fork_server, text, 1)
    run = Run(nccl_like(program, tmp_path), tmp_path)

    def kill(job):
        await_step(run, job, VPP2.protected_from)
        return kill_rank(run, job, 1, Random(1))

    train_on(run, lost=kill)
    assert generation_of(run) == 1
    assert digest_differences(run._digest(), uninterrupted(VPP2)) == []


def test_a_process_that_dies_while_ranks_connect_delays_nobody(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    program = restartable_program(PP2_EP2, megatron_fork_server, text, 2)
    run = Run(nccl_like(program, tmp_path, mishap="lost-member"), tmp_path)
    with run.start() as job:
        await_step(run, job, PP2_EP2.protected_from)
        lost = kill_rank(run, job, 2, Random(1))
        result = job.wait()
    codes = [code for process, code in enumerate(result.exit_codes) if process not in {lost, 1}]
    assert codes == [0] * len(codes), result.describe()
    assert digest_differences(run._digest(), uninterrupted(PP2_EP2)) == []


@pytest.mark.parametrize("mishap", slow_but(("failed-batch",), ("failed-batch", "failed-end")))
def test_a_batch_of_messages_that_fails_leaves_no_group_of_calls_open(
    megatron_fork_server, text, uninterrupted, tmp_path, mishap
):
    program = restartable_program(PP3, megatron_fork_server, text, 0, *STAGES)
    run = Run(nccl_like(program, tmp_path, mishap=mishap), tmp_path)
    train_on(run, lost=lambda job: None)
    assert generation_of(run) == 1
    assert digest_differences(run._digest(), uninterrupted(PP3, *STAGES)) == []


def test_a_job_does_not_begin_where_a_variable_would_let_its_survivors_end(
    megatron_fork_server, text, tmp_path
):
    program = nccl_like(restartable_program(PP3, megatron_fork_server, text, 0, *STAGES), tmp_path)
    program = dataclasses.replace(program, env={**program.env, "NCCL_NVLS_ENABLE": "1"})
    with Run(program, tmp_path).start() as job:
        result = job.wait()
    assert result.exit_codes == (2, 2, 2), result.describe()
    assert "over NCCL needs NCCL_NVLS_ENABLE=0, and it is '1'" in result.ranks[0].stderr


@pytest.mark.parametrize("garbage", slow_but((Garbage.PARTIAL.value,), GARBAGE))
def test_a_rank_that_is_interrupted_late_reads_garbage_and_changes_no_bit(
    megatron_fork_server, text, uninterrupted, tmp_path, garbage
):
    step = PP2_EP2.protected_from
    faults = ("--moevement-faults", f"exception:{step}:prepare@0")
    program = restartable_program(PP2_EP2, megatron_fork_server, text, 1, *faults)
    run = Run(nccl_like(program, tmp_path, Garbage(garbage), mishap="late-abort"), tmp_path)
    train_on(run, lost=lambda job: None)
    assert plans_of(run)[0]["target"] == step - 1
    assert digest_differences(run._digest(), uninterrupted(PP2_EP2)) == []


@pytest.mark.parametrize("name", slow_but((QUICK,), BY_NAME))
def test_a_lost_stage_replays_alone_and_no_bit_differs(
    megatron_fork_server, text, digest_of, tmp_path, name
):
    row, random = BY_NAME[name], Random(name)
    garbage = random.choice(list(Garbage))
    program = nccl_like(struck_program(row, megatron_fork_server, text), tmp_path, garbage)
    run = StruckRun(row, program, tmp_path, random)
    run.go()
    run.check(digest_of(plain_program, row))


SHOWN_BY = {
    "polled-results": (
        test_ranks_that_wait_for_a_slow_newcomer_are_not_taken_for_hung,
        "10 restarts in a row led to no new step",
    ),
    "connected-groups": (
        test_adjacent_stages_replay_while_others_of_their_pipeline_stand_by,
        # Or torch still counts the group of calls in which messages failed.
        "timed out|stages 1, 2 had not finished replaying|not in a group call",
    ),
    "closed-calls": (
        functools.partial(
            test_a_batch_of_messages_that_fails_leaves_no_group_of_calls_open,
            mishap="failed-batch",
        ),
        "JSONDecodeError",  # of what was gathered and has not come
    ),
    "connecting-thread": (
        test_a_process_that_dies_while_ranks_connect_delays_nobody,
        "the job needs 4 processes and has ",  # how many depends on who connects when
    ),
    "confirmed-steps": (
        functools.partial(
            test_a_rank_that_is_interrupted_late_reads_garbage_and_changes_no_bit,
            garbage=Garbage.PARTIAL.value,
        ),
        "can't follow to step",
    ),
}
"""What shows that a mend is needed, and what becomes of its job without it."""


TAKEN = ("megatron_fork_server", "text", "uninterrupted", "digest_of", "tmp_path")
"""Fixtures that there are for what shows it."""


def taken_by(shown_by):
    """Returns what a test takes that is not given to it."""
    given = getattr(shown_by, "keywords", {})
    return inspect.signature(shown_by).parameters.keys() - given.keys()


@pytest.mark.parametrize("mend", SHOWN_BY)
def test_what_shows_a_mend_takes_what_there_is_for_it(mend):
    shown_by, _ = SHOWN_BY[mend]
    assert taken_by(shown_by) <= {*TAKEN}


@pytest.mark.slow
@pytest.mark.usefixtures(*TAKEN)
@pytest.mark.parametrize("mend", SHOWN_BY)
def test_a_job_is_lost_without_the_mend_that_a_test_is_for(mend, request, monkeypatch):
    monkeypatch.setenv(WITHOUT, f"without-{mend}")
    shown_by, end = SHOWN_BY[mend]
    with pytest.raises(AssertionError, match=end):
        shown_by(**{name: request.node.funcargs[name] for name in taken_by(shown_by)})
