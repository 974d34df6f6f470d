# SPDX-License-Identifier: Apache-2.0
"""A disk without room for a checkpoint, and a state in memory: the job goes on."""

from random import Random

import pytest

from tests.harness.bad_input import small_disk
from tests.harness.interruption import Run, digest_differences
from tests.harness.protected_run import Case, check_replays

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(300)]

CASE = Case.of("pp2-ep2 bf16 distributed grouped", 3)


def test_a_job_goes_on_from_memory_whatever_room_the_disk_has(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    run = Run(CASE.protected_program(megatron_fork_server, text), tmp_path)
    run.kill(CASE.protected_from + 1, Random(0))
    with small_disk(run.checkpoints, 1 << 16):
        found = run.finish()
        assert list(run.checkpoints.glob("iter_*")) == []
    check_replays(run, CASE, launches=1)
    assert digest_differences(found, uninterrupted(CASE)) == []
