# SPDX-License-Identifier: Apache-2.0
"""A process is lost while the groups of a restart connect: its peers don't wait for it."""

import dataclasses
from pathlib import Path
from random import Random

import pytest

from tests.harness.interruption import Run, digest_differences
from tests.harness.protected_run import Case
from tests.harness.restarted_run import (
    await_step,
    check_survivors,
    kill_rank,
    restartable_program,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).with_name("rendezvous_pretrain.py")
CASE = dataclasses.replace(Case.of("pp2-ep2 bf16 distributed grouped", 3), deaths=1)
RANKS = CASE.combination.world_size
FIRST_SPARE, SECOND_SPARE = RANKS + 1, RANKS


@pytest.mark.parametrize(
    "rank", [0, *(pytest.param(rank, marks=pytest.mark.slow) for rank in range(1, RANKS))]
)
def test_survivors_go_on_with_the_next_spare(
    megatron_fork_server, text, uninterrupted, tmp_path, rank
):
    program = restartable_program(
        CASE, megatron_fork_server, text, 2, f"--dies-connecting={FIRST_SPARE}"
    )
    run = Run(dataclasses.replace(program, path=PROGRAM), tmp_path)
    with run.start() as job:
        await_step(run, job, CASE.protected_from)
        lost = {kill_rank(run, job, rank, Random(rank)), FIRST_SPARE}
        result = job.wait()
        pids = list(job.pids)
    codes = [-9 if process in lost else 0 for process in range(RANKS + 2)]
    assert list(result.exit_codes) == codes, result.describe()
    survivors = [pid for process, pid in enumerate(pids) if process not in {*lost, SECOND_SPARE}]
    check_survivors(run, survivors, generations=2)
    assert digest_differences(run._digest(), uninterrupted(CASE)) == []
