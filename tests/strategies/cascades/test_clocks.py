# SPDX-License-Identifier: Apache-2.0
"""The clock of a machine is set while a job trains: nothing is decided by the time of day."""

import dataclasses
from pathlib import Path

import pytest

from megatron_moevement.runtime.observation.events import EventName
from tests.harness.fault_cover import UNTIED
from tests.harness.interruption import Run, digest_differences
from tests.harness.protected_run import Case
from tests.harness.restarted_run import events_of, generation_of, restartable_program

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).with_name("clocks_pretrain.py")
CASE = dataclasses.replace(Case.of("vpp2 fp32 replicated no-dropout", 2), replicas=1, deaths=1)
SET = CASE.protected_from
KILLED = SET + 4
HOUR_S = 3600


@pytest.mark.parametrize(
    ("process", "by_s"),
    [
        pytest.param(0, HOUR_S, id="survivor-forward"),
        pytest.param(0, -HOUR_S, id="survivor-back", marks=pytest.mark.slow),
        pytest.param(1, HOUR_S, id="lost-forward", marks=pytest.mark.slow),
        pytest.param(1, -HOUR_S, id="lost-back", marks=pytest.mark.slow),
    ],
)
def test_nobody_is_given_up_and_an_outage_takes_as_long_as_it_takes(
    megatron_fork_server, text, uninterrupted, tmp_path, process, by_s
):
    often = "--inprocess-heartbeat-interval=0.02"
    program = restartable_program(
        CASE, megatron_fork_server, text, 1, UNTIED, often, f"--set-clock={process}:{SET}:{by_s}"
    )
    run = Run(dataclasses.replace(program, path=PROGRAM), tmp_path / "protected")
    with run.start("--moevement-faults", f"{KILLED}:backward@1") as job:
        result = job.wait()
    assert sorted(result.exit_codes) == [-9, 0, 0], result.describe()
    assert generation_of(run) == 1
    found = events_of(run, EventName.FAULT_DETECTED, 1)
    for event in found:
        assert [loss["process"] for loss in event.fields["losses"]] == [1]
    plans = events_of(run, EventName.PLAN, 1)
    assert {(plan.fields["verdict"], plan.fields["target"]) for plan in plans} == {
        ("LOCALIZED", KILLED - 1)
    }
    for event in events_of(run, EventName.RECOVERED, 1):
        parts = event.fields["breakdown_s"]
        assert all(0 <= seconds < HOUR_S / 2 for seconds in parts.values()), parts
    assert digest_differences(run._digest(), uninterrupted(CASE, UNTIED)) == []
