# SPDX-License-Identifier: Apache-2.0
"""`moevement watch` shows a run that goes on, from its events."""

import io
import os
import pty
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from megatron_moevement.cli import main
from megatron_moevement.cli.watch import page
from megatron_moevement.errors import ExitCode
from megatron_moevement.policy.job.ranks import Layout
from megatron_moevement.policy.report.newest import Newest
from tests.harness.synthetic_run import Shape, SyntheticRun


def run_of(**shape):
    return SyntheticRun(
        Shape(**{"steps": 39, "faults": 1, "seed": 1, "layout": Layout(pp=2, dp=2), **shape})
    )


def lines(newest, now_s):
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(page(newest, now_s))
    return console.export_text().splitlines()


def newest_of(run, until_s=float("inf")):
    newest = Newest()
    for place, records in run.records.items():
        for record in records:
            if record.time <= until_s:
                newest.take(str(place), record)
    return newest


def test_once_it_prints_step_protection_processes_and_losses(tmp_path, capsys):
    run = run_of()
    run.write(tmp_path / "events")
    assert main(["watch", "--once", str(tmp_path / "events")]) == ExitCode.DONE
    printed = capsys.readouterr().out
    assert "run synthetic  step 39  generation 1" in printed
    assert "protection: full, 2 of 2 copies" in printed
    assert "LOCALIZED" in printed


def test_a_recovery_that_goes_on_shows_its_plan(tmp_path):
    run = run_of()
    planned_ns = max(run.facts)  # after those of the start
    shown = lines(newest_of(run, planned_ns / 1e9 + 0.1), planned_ns / 1e9 + 0.2)
    assert any("LOCALIZED: stages " in line for line in shown)
    assert any("restoring" in line for line in shown)


def test_of_many_processes_only_the_odd_ones_are_listed():
    run = run_of(layout=Layout(pp=8, dp=8), spares=1)
    newest = newest_of(run, max(r.time for r in run.records[0, 0]) - 3.0)
    shown = lines(newest, newest.time_s)
    assert any("64 processes: training" in line for line in shown)
    assert len(shown) < 12
    assert sum("was killed by" in line or "exit code 1" in line for line in shown) == 2


@pytest.mark.parametrize("flags", [["none"], [".", "--every", "0"], [".", "--once"], ["."]])
def test_bad_input_is_refused(tmp_path, monkeypatch, flags, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["watch", *flags]) == ExitCode.BAD_ARGUMENTS
    assert "moevement watch: " in capsys.readouterr().err


def test_it_goes_on_until_ctrl_c(tmp_path):
    run_of().write(tmp_path / "events")
    # A shell starts what runs in the background without Ctrl-C.
    python = ["env", "--default-signal=INT", sys.executable]
    command = [*python, "-m", "megatron_moevement.cli", "watch", str(tmp_path / "events")]
    reader, terminal = pty.openpty()
    watching = subprocess.Popen([*command, "--every", "0.05"], stdout=terminal)
    os.close(terminal)
    shown = b""
    try:
        while shown.count(b"run synthetic") < 3:
            chunk = read_some(reader)
            assert chunk
            shown += chunk
        watching.send_signal(signal.SIGINT)
        while read_some(reader):
            pass
        assert watching.wait() == ExitCode.DONE
    finally:
        watching.kill()
        watching.wait()
        os.close(reader)


def read_some(reader):
    """Reads from a terminal; nothing once all that write to it have ended."""
    try:
        return os.read(reader, 1 << 16)
    except OSError:
        return b""
