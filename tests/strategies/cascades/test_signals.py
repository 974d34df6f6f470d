# SPDX-License-Identifier: Apache-2.0
"""What killed a process: its launcher sees it, and survivors put it into event and line."""

import dataclasses
import subprocess
from pathlib import Path

import pytest

from megatron_moevement.runtime.observation.events import EventName, read_events
from tests.harness.fault_cover import UNTIED
from tests.harness.protected_run import Case
from tests.harness.restarted_run import restartable_program

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(300)]

LAUNCHER = Path(__file__).parents[3] / "scripts" / "run_local.sh"
PROGRAM = Path(__file__).with_name("patient_pretrain.py")
CASE = dataclasses.replace(Case.of("vpp2 fp32 replicated no-dropout", 2), replicas=1)
KILLED = CASE.protected_from + 2


@pytest.mark.parametrize(
    ("kind", "end"),
    [("kill", "was killed by SIGKILL"), ("segfault", "was killed by SIGSEGV")],
)
def test_a_loss_says_how_the_process_ended(megatron_fork_server, text, tmp_path, kind, end):
    program = restartable_program(CASE, megatron_fork_server, text, 1, UNTIED)
    flags = [
        *program.flags,
        f"--train-iters={CASE.train_iters}",
        f"--data-cache-path={tmp_path / 'index'}",
        f"--moevement-event-dir={tmp_path / 'events'}",
        f"--moevement-store-dir={tmp_path / 'store'}",
        f"--moevement-faults={kind}:{KILLED}:backward@1",
    ]
    command = [LAUNCHER, "-n", "2", "-s", "1", "--program", PROGRAM, "--", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert ended.returncode == 0, ended.stderr
    events = read_events(tmp_path / "events")
    found = [event for event in events if event.event is EventName.FAULT_DETECTED]
    (loss,) = found[0].fields["losses"]
    assert (loss["process"], loss["rank"]) == (1, 1)
    assert loss["end"] == end
    (line,) = [line for line in ended.stderr.splitlines() if " loss of " in line]
    assert line.endswith(f"; it {end}")
