# SPDX-License-Identifier: Apache-2.0
"""A job that runs out of processes goes on from what it wrote beside its durable checkpoints."""

import pytest

from tests.harness.interruption import Run, digest_differences
from tests.harness.protected_run import Case, plans_of
from tests.harness.restarted_run import restartable_program

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

CASE = Case.of("pp2-ep2 bf16 distributed grouped", 3)
STEP = CASE.protected_from + 2
CONVERT = "--moevement-recover-only"


def stop(run):
    """Kills a rank of a job that has no spare."""
    with run.start("--moevement-faults", f"{STEP}:barrier@1") as job:
        result = job.wait()
    assert sorted(result.exit_codes) == [-9, 75, 75, 75], result.describe()
    lines = [rank.stderr.splitlines()[-1] for rank in result.ranks if rank.exit_code == 75]
    folder = run.checkpoints / "moevement" / "flushed"
    assert all(f"its state is in {folder}" in line for line in lines), lines
    return folder


@pytest.mark.slow
def test_on_other_machines_it_is_converted_and_goes_on(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    run = Run(restartable_program(CASE, megatron_fork_server, text, 0), tmp_path)
    flushed = stop(run)
    files = {path: path.read_bytes() for path in flushed.rglob("*") if path.is_file()}
    converted = run.finish(
        CONVERT, f"--moevement-store-dir={tmp_path}/second", f"--save={tmp_path}/elsewhere"
    )
    assert converted["iteration"] == STEP - 1
    assert {path: path.read_bytes() for path in flushed.rglob("*") if path.is_file()} == files
    third = f"--moevement-store-dir={tmp_path}/third"
    assert digest_differences(run.finish(third), uninterrupted(CASE)) == []
    assert {plan["target"] for plan in plans_of(run)} == {STEP - 1}
    assert not any(flushed.iterdir())


@pytest.mark.slow
def test_where_nothing_can_be_written_it_stays_in_memory(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    run = Run(restartable_program(CASE, megatron_fork_server, text, 0), tmp_path)
    run.checkpoints.mkdir()
    (run.checkpoints / "moevement").mkdir()
    (run.checkpoints / "moevement" / "flushed").touch()
    with run.start("--moevement-faults", f"{STEP}:barrier@1") as job:
        result = job.wait()
    assert sorted(result.exit_codes) == [-9, 75, 75, 75], result.describe()
    assert "its state is in memory, and not in --save" in result.describe()
    assert digest_differences(run.finish(), uninterrupted(CASE)) == []
    assert {plan["target"] for plan in plans_of(run)} == {STEP - 1}
