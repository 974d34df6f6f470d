# SPDX-License-Identifier: Apache-2.0
"""A process that can't be reached any more is replaced as a holder of copies, while all train."""

import dataclasses
from pathlib import Path
from random import Random

import pytest

from megatron_moevement.runtime.observation.events import EventName
from tests.harness.interruption import Run, digest_differences
from tests.harness.protected_run import Case
from tests.harness.restarted_run import (
    await_step,
    check_verdicts,
    events_of,
    kill_rank,
    restartable_program,
)

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).with_name("troubled_pretrain.py")


def test_the_copies_of_a_lost_rank_are_with_who_replaced_its_silent_holder(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    """The only copies go to one process, then it can't be reached any more, then the rank dies."""
    case = Case.of("pp2-ep2 bf16 distributed grouped", 2)
    case = dataclasses.replace(case, replicas=1, deaths=4)
    silent_at = case.protected_from
    program = restartable_program(
        case, megatron_fork_server, text, 1, f"--unreachable=0:1:{silent_at}"
    )
    run = Run(dataclasses.replace(program, path=PROGRAM), tmp_path)
    with run.start() as job:
        await_step(run, job, silent_at + 2 * case.window + 1)
        kill_rank(run, job, 0, Random(0))
        result = job.wait()
    assert sorted(result.exit_codes) == [-9, 0, 0, 0, 0], result.describe()
    assert "keeps the copies of pp0.dp0.tp0.cp0.ep0 instead of process 1" in result.describe()
    (changed,) = events_of(run, EventName.HOLDERS_CHANGED, None)
    (successor,) = changed.fields["holders"]
    assert (changed.logical_rank, changed.fields["former"]) == (0, [1])
    assert changed.iteration >= silent_at
    assert f"process {successor} keeps the copies of pp0.dp0" in result.describe()
    check_verdicts(run, case, restarts=1)
    assert digest_differences(run._digest(), uninterrupted(case)) == []
