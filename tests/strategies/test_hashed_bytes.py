# SPDX-License-Identifier: Apache-2.0
"""A recovery reads no memory but what it loads or serves."""

import dataclasses
from pathlib import Path
from random import Random

import pytest

from megatron_moevement.runtime.observation.events import EventName
from tests.harness.fault_cover import UNTIED
from tests.harness.interruption import Run
from tests.harness.protected_run import Case
from tests.harness.restarted_run import (
    await_step,
    events_of,
    kill_rank,
    restartable_program,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).with_name("counted_pretrain.py")
SHAPE = (UNTIED, "--expert-model-parallel-size=1", "--inprocess-active-world-size=2")


def test_processes_hash_what_they_load_or_serve_and_nothing_else(
    megatron_fork_server, text, tmp_path
):
    case = dataclasses.replace(Case.of("pp2-ep2 bf16 distributed grouped", 3), replicas=1, deaths=1)
    program = restartable_program(case, megatron_fork_server, text, 0, *SHAPE)
    run = Run(dataclasses.replace(program, path=PROGRAM, world_size=3), tmp_path)
    with run.start() as job:
        await_step(run, job, case.protected_from)
        kill_rank(run, job, 0, Random(0))
        result = job.wait()
    assert sorted(result.exit_codes) == [-9, 0, 0], result.describe()
    newcomer, survivor = sorted(
        events_of(run, EventName.RECOVERED, 1), key=lambda event: event.logical_rank
    )
    for one in (newcomer.fields, survivor.fields):
        assert one["hashed_bytes"] == one["loaded"] + one["slots"] + one["logged"]
    assert newcomer.fields["loaded"] > 0
    assert survivor.fields["loaded"] == 0
    assert survivor.fields["slots"] > 0
    assert survivor.fields["logged"] > 0
