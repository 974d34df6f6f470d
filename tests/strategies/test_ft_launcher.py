# SPDX-License-Identifier: Apache-2.0
"""A job under ft_launcher, which restarts processes: it goes on from host memory, bit by bit."""

import contextlib
import getpass
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from megatron_moevement.runtime.observation.events import EventName, read_events
from tests.harness.interruption import digest_differences
from tests.harness.restarted_run import RESTARTABLE
from tests.harness.tiny_job import TINY

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "run_ft_launcher.sh"
PROGRAM = (
    *TINY,
    "--bf16",
    "--use-distributed-optimizer",
    "--pipeline-model-parallel-size=2",
    "--train-iters=20",
    "--log-interval=1",
    "--moevement-no-progress-bar",
)
LIMITS = "--ft-rank-section-timeouts=setup:60,step:{step},checkpointing:60"
QUICK = ("--monitor-interval=0.2", "--ft-workload-check-interval=0.5")


@contextlib.contextmanager
def started(command, folder, flags):
    """Starts a launcher of the training program; whatever is left of its group is killed."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # A socket's path has at most 107 bytes: pytest's own folders would be too deep.
    with tempfile.TemporaryDirectory() as temporary, (folder / "log").open("w") as output:
        process = subprocess.Popen(
            [*command, "--", *PROGRAM, f"--moevement-state-digest={folder}/digest.json", *flags],
            env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "TMPDIR": temporary},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)
        assert set(os.listdir(temporary)) <= {f"torchinductor_{getpass.getuser()}"}


def program(command, folder, flags):
    """Runs a launcher of the training program to its end; returns the digest and what it said."""
    with started(command, folder, flags) as process:
        code = process.wait(200)
    log = (folder / "log").read_text()
    assert code == 0, log[-5000:]
    return json.loads((folder / "digest.json").read_text()), log


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Returns the digest of a job that nothing protects and nobody interrupts."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    launcher = (sys.executable, "-m", "megatron_moevement.cli.launch", "-n", "2")
    return program(launcher, folder, ())[0]


def protection(folder):
    """Returns the flags that let a job go on from memory."""
    return (
        "--moevement-strategy=moevement",
        "--moevement-window=2",
        f"--moevement-store-dir={folder / 'store'}",
        f"--moevement-event-dir={folder / 'events'}",
    )


class Restarted:
    """A job that was restarted by ft_launcher."""

    def __init__(self, folder, launcher, *flags):
        script = (SCRIPT, *launcher, *QUICK)
        self.digest, self.log = program(script, folder, (*protection(folder), *flags))
        self.events = read_events(folder / "events")
        assert list((folder / "store").rglob("*")) == []

    def verdicts(self):
        """Returns generation and verdict of each recovery of rank 0, in their order."""
        plans = [event for event in self.events if event.event is EventName.PLAN]
        plans = sorted((plan for plan in plans if not plan.logical_rank), key=lambda one: one.time)
        return [(plan.generation, plan.fields["verdict"]) for plan in plans]

    def struck(self):
        """Returns the kinds of faults that struck."""
        return [
            event.fields["kind"] for event in self.events if event.event is EventName.FAULT_INJECTED
        ]


@pytest.mark.slow
def test_a_killed_rank_is_restarted_and_the_job_goes_on_from_memory(uninterrupted, tmp_path):
    run = Restarted(
        tmp_path,
        ("-n", "2", "--ft-rank-heartbeat-timeout=600"),
        "--moevement-faults=12:after-barrier@1",
    )
    assert digest_differences(run.digest, uninterrupted) == []
    assert run.verdicts() == [(0, "GLOBAL")]
    assert run.struck() == ["kill"]


@pytest.mark.slow
def test_a_rank_that_hangs_is_found_by_its_monitor(uninterrupted, tmp_path):
    run = Restarted(
        tmp_path,
        ("-n", "2", LIMITS.format(step=5)),
        "--enable-ft-package",
        "--calc-ft-timeouts",
        "--ft-num-warmup-iters=2",
        f"--save={tmp_path / 'checkpoints'}",
        "--moevement-faults=stop:12:after-barrier@1",
    )
    assert digest_differences(run.digest, uninterrupted) == []
    assert run.verdicts() == [(0, "GLOBAL")]
    assert run.struck() == ["stop"]
    assert "Section 'step' has been open for" in run.log
    learned = json.loads((tmp_path / "checkpoints" / "ft_state.json").read_text())
    # No process loaded a checkpoint in its set-up, and few steps were left after the restart.
    assert learned["current_timeouts"]["section"]["calculated_sections"] == ["checkpointing"]


@pytest.mark.slow
def test_first_in_place_and_with_too_few_left_in_the_job(uninterrupted, tmp_path):
    run = Restarted(
        tmp_path,
        ("-n", "2", "-s", "1", LIMITS.format(step=60)),
        *RESTARTABLE,
        "--enable-ft-package",
        "--ft-num-warmup-iters=2",
        "--moevement-faults",
        "12:after-barrier@1",
        "15:barrier@0#1",
    )
    assert digest_differences(run.digest, uninterrupted) == []
    assert run.verdicts() == [(1, "GLOBAL"), (0, "GLOBAL")]
    assert run.struck() == ["kill", "kill"]
    assert re.search(
        r"the job needs 2 processes and has 1, after rank . on \S+ \(process ..*; "
        "its state is in memory",
        run.log,
    )


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True])
def test_nothing_is_left_after_an_interrupt_from_the_keyboard(in_place, tmp_path):
    launcher = ("-n", "2", *(("-s", "1") if in_place else ()), LIMITS.format(step=60), *QUICK)
    flags = (*protection(tmp_path), "--train-iters=100000", *(RESTARTABLE if in_place else ()))
    with started((SCRIPT, *launcher), tmp_path, flags) as process:
        while not [
            event
            for event in read_events(tmp_path / "events")
            if event.event is EventName.ITERATION and event.iteration > 5
        ]:
            assert process.poll() is None, (tmp_path / "log").read_text()[-5000:]
            time.sleep(0.2)
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
        assert process.wait(60) == 130
        assert psutil.wait_procs(family, 10)[1] == []
    assert list((tmp_path / "store").rglob("*")) == []
