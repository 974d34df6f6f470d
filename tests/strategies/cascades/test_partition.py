# SPDX-License-Identifier: Apache-2.0
"""Two ranks that live do not reach each other any more; everybody else and the stores they do."""

import dataclasses
import re
import time
from pathlib import Path

import pytest

from megatron_moevement.runtime.observation.events import EventName
from tests.harness.fault_cover import UNTIED
from tests.harness.fork_server import JobFailedError
from tests.harness.interruption import Run, digest_differences
from tests.harness.protected_run import Case
from tests.harness.restarted_run import (
    await_step,
    events_of,
    generation_of,
    restartable_program,
)

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).with_name("parted_pretrain.py")
CASE = dataclasses.replace(Case.of("vpp2 fp32 replicated no-dropout", 2), replicas=1)
LIMITS = (
    "--inprocess-soft-timeout=10",
    "--inprocess-hard-timeout=60",
    "--inprocess-barrier-timeout=80",
)


def parted(server, text, folder, *flags):
    program = restartable_program(
        CASE, server, text, 0, UNTIED, *LIMITS, *flags, f"--parted={folder}:0:1"
    )
    return dataclasses.replace(program, path=PROGRAM, timeout_s=200)


@pytest.fixture
def network(tmp_path):
    """Returns the folder that parts the network."""
    folder = tmp_path / "network"
    folder.mkdir()
    return folder


@pytest.fixture
def digest(megatron_fork_server, text, tmp_path):
    return Run(CASE.program(megatron_fork_server, text, UNTIED), tmp_path / "plain").finish()


def test_when_they_reach_each_other_again_they_go_on(
    megatron_fork_server, text, tmp_path, network, digest
):
    run = Run(parted(megatron_fork_server, text, network), tmp_path / "parted")
    with run.start() as job:
        await_step(run, job, CASE.protected_from)
        (network / "parted").touch()
        while not (network / "generation-1").exists():
            job.poll()
            if job.has_ended:
                raise JobFailedError(job.wait().describe())
            time.sleep(0.02)
        (network / "parted").unlink()
        result = job.wait()
    assert result.exit_codes == (0, 0), result.describe()
    last = generation_of(run)
    assert last >= 1
    plans = events_of(run, EventName.PLAN, last)
    assert {plan.fields["verdict"] for plan in plans} == {"RESUME"}
    assert not events_of(run, EventName.REPLAY, None)
    assert digest_differences(run._digest(), digest) == []


def test_where_they_never_do_the_job_ends_with_a_line_and_its_memory(
    megatron_fork_server, text, tmp_path, network, digest
):
    program = parted(
        megatron_fork_server,
        text,
        network,
        "--inprocess-max-iterations=2",
        "--distributed-timeout-minutes=1",
    )
    run = Run(program, tmp_path / "parted")
    with run.start() as job:
        await_step(run, job, CASE.protected_from)
        (network / "parted").touch()
        result = job.wait()
    assert result.exit_codes == (75, 75), result.describe()
    for rank in result.ranks:
        assert f"process {rank.rank} stops: --inprocess-max-iterations 2 is reached" in rank.stderr
    newest = max(event.iteration for event in events_of(run, EventName.ITERATION, None))
    (network / "parted").unlink()
    with run.start() as job:
        result = job.wait().check()
    target = int(re.search(r"resumed at step (\d+)", result.ranks[0].stderr)[1])
    assert newest <= target <= newest + 1
    assert digest_differences(run._digest(), digest) == []
