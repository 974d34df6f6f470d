# SPDX-License-Identifier: Apache-2.0
"""Memory runs out in a recovery: in the file system of the stores, of a process, of its machine."""

import contextlib
import dataclasses
import os
import re
from pathlib import Path

import pytest

from megatron_moevement.runtime.observation.events import EventName
from tests.harness.bad_input import small_disk
from tests.harness.fault_cover import UNTIED
from tests.harness.interruption import Run, digest_differences
from tests.harness.protected_run import Case
from tests.harness.restarted_run import events_of, restartable_program

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).with_name("scarce_pretrain.py")
CASE = dataclasses.replace(Case.of("vpp2 fp32 replicated no-dropout", 2), replicas=1)
KILLED = CASE.protected_from + 2
NEWCOMER = 2
ROOM_BYTES = 512 << 20
GROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture(scope="module")
def digest(megatron_fork_server, text, tmp_path_factory):
    """Returns what is trained when nothing is scarce."""
    folder = tmp_path_factory.mktemp("plain")
    return Run(CASE.program(megatron_fork_server, text, UNTIED), folder).finish()


def scarce(server, text, folder, spares, *flags):
    program = restartable_program(CASE, server, text, spares, UNTIED, *flags)
    return Run(dataclasses.replace(program, path=PROGRAM), folder)


def killed_once(run):
    """Runs a job whose rank 1 is killed; returns how its processes ended."""
    with run.start("--moevement-faults", f"{KILLED}:backward@1") as job:
        result = job.wait()
    assert result.exit_codes[1] == -9, result.describe()
    assert not result.timed_out
    return result


def goes_on(run, folder, digest, *more):
    """Checks that another launch goes on where the first one stopped, and ends with its bits."""
    run = Run(dataclasses.replace(run._program, world_size=2), folder)
    flags = [flag for flag in run._program.flags if flag != "--moevement-no-adoption"]
    run._program = dataclasses.replace(run._program, flags=tuple(flags))
    newest = max(event.iteration for event in events_of(run, EventName.ITERATION, None))
    with run.start(*more) as job:
        result = job.wait().check()
    target = int(re.search(r"resumed at step (\d+)", result.ranks[0].stderr)[1])
    assert newest <= target <= newest + 1
    assert digest_differences(run._digest(), digest) == []


@pytest.mark.parametrize(
    ("left_bytes", "reason"),
    [(0, "No space left on device"), (1 << 16, "bytes and its file system has ")],
    ids=["full", "nearly-full"],
)
@pytest.mark.parametrize("machine", ["store", "machine"], ids=["everybodys", "its-own"])
def test_where_a_newcomer_finds_no_room_for_its_store_nothing_is_lost(
    megatron_fork_server, text, tmp_path, digest, machine, left_bytes, reason
):
    folder = tmp_path / machine
    folder.mkdir()
    machines = f"--machine={NEWCOMER}:{folder}"
    fill = f"--fill={NEWCOMER}:{left_bytes}"
    run = scarce(megatron_fork_server, text, tmp_path, 1, fill, machines)
    with small_disk(folder, ROOM_BYTES):
        result = killed_once(run)
        (folder / "of-somebody-else").unlink()
        if left_bytes and machine == "machine":  # what it had in reserve is enough
            assert result.exit_codes == (0, -9, 0), result.describe()
            assert digest_differences(run._digest(), digest) == []
            return
        assert result.exit_codes == (75, -9, 75), result.describe()
        short = 0 if left_bytes else NEWCOMER
        (line,) = [line for line in result.ranks[short].stderr.splitlines() if "stops" in line]
        assert f"process {short} stops: it is not healthy: " in line
        assert reason in line
        assert "launch the job again" in line
        goes_on(run, tmp_path, digest, f"--machine=1:{folder}")


@pytest.mark.parametrize("who", [0, NEWCOMER], ids=["survivor", "newcomer"])
@pytest.mark.parametrize("generations", [1, 100], ids=["for-a-moment", "for-ever"])
def test_a_process_gets_no_memory_in_a_recovery(
    megatron_fork_server, text, tmp_path, digest, who, generations
):
    run = scarce(megatron_fork_server, text, tmp_path, 1, f"--starve={who}:{generations}")
    result = killed_once(run)
    assert result.exit_codes[0] in (0, 75)
    if result.exit_codes[0]:
        goes_on(run, tmp_path, digest)
    assert digest_differences(run._digest(), digest) == []


def test_the_kernel_kills_a_newcomer_for_want_of_memory(
    megatron_fork_server, text, tmp_path, digest
):
    if not os.access(GROUPS, os.W_OK):
        pytest.skip("control groups can't be made here")
    spares = (2, 3)  # of which any takes the place
    squeezed = [f"--squeeze={spare}" for spare in spares]
    run = scarce(megatron_fork_server, text, tmp_path, len(spares), *squeezed)
    run.store.mkdir()
    with small_disk(run.store, ROOM_BYTES):  # in memory, which counts
        result = killed_once(run)
    for group in GROUPS.glob("moevement-test-*"):
        with contextlib.suppress(OSError):  # the kernel is not done with it
            group.rmdir()
    assert sorted(result.exit_codes) == [-9, -9, 0, 0], result.describe()
    last = events_of(run, EventName.PLAN, 2)
    assert {plan.fields["verdict"] for plan in last} == {"LOCALIZED"}
    assert all(event.fields["replay_verified"] for event in events_of(run, EventName.REPLAY, 2))
    assert digest_differences(run._digest(), digest) == []
