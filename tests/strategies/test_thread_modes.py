# SPDX-License-Identifier: Apache-2.0
"""What an interrupt leaves in torch's modes of a thread reaches no later generation."""

import dataclasses
from pathlib import Path

import pytest

from megatron_moevement.runtime.observation.events import EventName
from tests.harness.fault_cover import UNTIED
from tests.harness.interruption import Run, digest_differences
from tests.harness.protected_run import Case
from tests.harness.restarted_run import check_survivors, events_of, restartable_program

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).with_name("gradless_pretrain.py")
CASE = dataclasses.replace(Case.of("pp2-ep2 bf16 distributed grouped", 3), deaths=1)
SHAPE = (UNTIED, "--expert-model-parallel-size=1")
KILL = 8


def test_an_interrupt_inside_of_no_grad_costs_no_process_its_gradients(
    megatron_fork_server, text, tmp_path
):
    flags = (*SHAPE, "--inprocess-active-world-size=2")
    faults = ("--moevement-faults", f"kill:{KILL}:backward@0")
    program = restartable_program(CASE, megatron_fork_server, text, 1, *flags, *faults)
    program = dataclasses.replace(program, path=PROGRAM, world_size=3)
    run = Run(program, tmp_path / "protected")
    with run.start() as job:
        result = job.wait()
    assert sorted(result.exit_codes) == [-9, 0, 0], result.describe()
    (survivor,) = {one.pid for one in events_of(run, EventName.FAULT_DETECTED, 1)} & set(job.pids)
    check_survivors(run, [survivor], 1)
    assert len(events_of(run, EventName.RECOVERED, 1)) > 0
    plain = CASE.program(megatron_fork_server, text, *SHAPE)
    digest = Run(dataclasses.replace(plain, world_size=2), tmp_path / "plain").finish()
    assert digest_differences(run._digest(), digest) == []
