# SPDX-License-Identifier: Apache-2.0
"""A spare is warm: it has imported what training needs before it is needed."""

import dataclasses
from pathlib import Path

import pytest

from megatron_moevement.runtime.observation.events import EventName
from tests.harness.interruption import Run
from tests.harness.protected_run import Case
from tests.harness.restarted_run import events_of, restartable_program

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(300)]

CASE = Case.of("vpp2 bf16 distributed", 3)
STEP = CASE.protected_from + 1
"""Behind a persisted window, so that the spare replays before it trains."""
PROGRAM = Path(__file__).with_name("watched_pretrain.py")
SLOW_TO_IMPORT = ("megatron.", "nvidia_resiliency_ext.", "torch._dynamo.")


def test_a_spare_that_takes_a_place_imports_nothing_large(fork_server, text, tmp_path):
    imports = tmp_path / "imports"
    imports.mkdir()
    # A server without Megatron: what ranks inherit from it is not looked for.
    program = restartable_program(CASE, fork_server, text, 1)
    flags = (*program.flags, f"--imports={imports}")
    run = Run(dataclasses.replace(program, path=PROGRAM, flags=flags), tmp_path / "run")
    with run.start("--moevement-faults", f"{STEP}:forward@1") as job:
        result = job.wait()
    assert sorted(result.exit_codes) == [-9, 0, 0], result.describe()
    (fault,) = events_of(run, EventName.FAULT_INJECTED, 0)
    (spare,) = events_of(run, EventName.PROCESS_START, 1)
    assert spare.logical_rank == fault.logical_rank
    lines = [line.split() for line in (imports / str(spare.pid)).read_text().splitlines()]
    before = [name for time_s, name in lines if float(time_s) < fault.time]
    after = [name for time_s, name in lines if float(time_s) >= fault.time]
    for package in SLOW_TO_IMPORT:
        assert any(name.startswith(package) for name in before), package
    print(f"{len(before)} modules before the fault, afterwards: {after}")
    assert [name for name in after if name.startswith(SLOW_TO_IMPORT)] == []
