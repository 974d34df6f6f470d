# SPDX-License-Identifier: Apache-2.0
"""A process stands still with its monitor, as on a machine that is suspended, and wakes up later.

The others have taken it for lost by then, and a spare has its rank.
"""

import dataclasses
import os
import signal
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

PROGRAM = Path(__file__).with_name("suspended_pretrain.py")
CASE = dataclasses.replace(Case.of("vpp2 fp32 replicated no-dropout", 2), replicas=1, deaths=12)
PATIENT = (
    "--inprocess-soft-timeout=180",
    "--inprocess-hard-timeout=190",
    "--inprocess-barrier-timeout=200",
    "--inprocess-completion-timeout=200",
    "--inprocess-heartbeat-interval=0.25",
    "--inprocess-heartbeat-timeout=5",
)
"""Who stands still is missed for want of signs of its monitor, and by nothing else."""
LOST = 1


def await_event(run, job, name, generation):
    """Waits until an event of a generation was recorded."""
    while not events_of(run, name, generation):
        job.poll()
        if job.has_ended:
            raise JobFailedError(job.wait().describe())
        time.sleep(0.02)


@pytest.mark.parametrize("adopts", [True, False], ids=["adoption", "no-adoption"])
def test_who_wakes_up_after_it_was_given_up_ends_and_touches_nothing(
    megatron_fork_server, text, tmp_path, adopts
):
    notes = tmp_path / "monitors"
    notes.mkdir()
    program = restartable_program(
        CASE, megatron_fork_server, text, 1, UNTIED, *PATIENT, f"--note-monitor={notes}"
    )
    flags = [flag for flag in program.flags if not (adopts and flag == "--moevement-no-adoption")]
    program = dataclasses.replace(program, path=PROGRAM, flags=tuple(flags))
    run = Run(program, tmp_path / "suspended")
    with run.start() as job:
        await_step(run, job, CASE.protected_from)
        monitor = int((notes / str(LOST)).read_text())
        os.kill(monitor, signal.SIGSTOP)
        job.kill(LOST, signal.SIGSTOP)
        await_event(run, job, EventName.RECOVERED, 1)
        await_event(run, job, EventName.ITERATION, 1)
        os.kill(monitor, signal.SIGCONT)
        job.kill(LOST, signal.SIGCONT)
        result = job.wait()
    assert result.exit_codes == (0, 75, 0), result.describe()
    (line,) = [line for line in result.ranks[LOST].stderr.splitlines() if "stops" in line]
    assert f"process {LOST} stops: the others have given it up" in line
    assert generation_of(run) == 1
    plans = events_of(run, EventName.PLAN, 1)
    assert {(plan.fields["verdict"], *plan.fields["scope"]) for plan in plans} == {("LOCALIZED", 1)}
    replays = events_of(run, EventName.REPLAY, 1)
    assert all(event.fields["replay_verified"] for event in replays)
    assert len({event.iteration for event in replays}) >= CASE.window - 1
    for event in events_of(run, EventName.FAULT_DETECTED, 1):
        (loss,) = event.fields["losses"]
        assert loss["process"] == LOST
        assert "no heartbeat" in loss["reason"]
    plain = Run(CASE.program(megatron_fork_server, text, UNTIED), tmp_path / "plain").finish()
    assert digest_differences(run._digest(), plain) == []
    assert list(run.store.rglob("*")) == []
