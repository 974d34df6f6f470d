# SPDX-License-Identifier: Apache-2.0
"""Jobs whose Adam counts steps per group recover with the same bits, as those of torch's Adam."""

import dataclasses
from pathlib import Path

import pytest

from megatron_moevement.settings.faults import FaultPoint
from tests.harness.interruption import Run, digest_differences
from tests.harness.protected_run import Case, check_replays, die, next_death

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).with_name("group_step_pretrain.py")
CASES = (
    Case.of("vpp2 fp16 replicated grouped", 2),
    Case.of("edp3 fp16 distributed bias", 3),
    Case.of("pp2-ep2 bf16 distributed-overlap", 3),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_job_killed_twice_ends_with_the_bits_of_one_that_is_not(
    megatron_fork_server, text, tmp_path, case
):
    def counting_per_group(program):
        return dataclasses.replace(program, path=PROGRAM)

    plain = counting_per_group(case.program(megatron_fork_server, text))
    expected = Run(plain, tmp_path / "plain").finish()
    protected = counting_per_group(case.protected_program(megatron_fork_server, text))
    run = Run(protected, tmp_path / "killed")
    for _ in range(case.deaths):
        die(run, case, FaultPoint.BARRIER, [next_death(run, case)])
    assert digest_differences(run.finish(), expected) == []
    check_replays(run, case, launches=case.deaths)
