# SPDX-License-Identifier: Apache-2.0
"""`moevement watch` shows a run that goes on, from its events."""

import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from megatron_moevement.cli import main
from megatron_moevement.cli.job_end import describe_status
from megatron_moevement.cli.watch import Damage, document, lasting_page, page, take_news
from megatron_moevement.errors import ExitCode
from megatron_moevement.policy.accounting.event import EventName, EventRecord
from megatron_moevement.policy.job.ranks import Layout
from megatron_moevement.policy.report.newest import Newest
from tests.harness.synthetic_run import Shape, SyntheticRun


def run_of(**shape):
    return SyntheticRun(
        Shape(**{"steps": 39, "faults": 1, "seed": 1, "layout": Layout(pp=2, dp=2), **shape})
    )


def lines(newest, now_s):
    return printed(page(newest, now_s))


def printed(shown):
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(shown)
    return console.export_text().splitlines()


def damage(folder, event):
    """Writes an event of a kind that has none of its fields, as another build might."""
    line = {"time": 4e9, "logical_rank": 0, "pid": 1, "generation": 9, "iteration": 99}
    of_protection = (path for path in folder.glob("*.jsonl") if '"level"' in path.read_text())
    with min(of_protection).open("a") as file:
        file.write(json.dumps({**line, "event": event.value}) + "\n")


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


@pytest.mark.parametrize("once", [["--once"], []])
def test_programs_get_what_the_page_is_made_of(tmp_path, capsys, once):
    run_of().write(tmp_path / "events")
    assert main(["watch", *once, str(tmp_path / "events"), "--json"]) == ExitCode.DONE
    found = json.loads(capsys.readouterr().out)
    assert (found["run_id"], found["step"], found["generation"]) == ("synthetic", 39, 1)
    assert found["protection"]["level"] == "full"
    assert found["window"]["start"] + found["window"]["size"] - 1 <= 39
    failed = [one for one in found["processes"] if one["code"]]
    lived = [one for one in found["processes"] if one["rank"] >= 0 and one not in failed]
    assert [one["rank"] for one in lived] == [0, 1, 2, 3]
    assert failed
    assert [one["doing"] for one in failed] == [describe_status(one["code"]) for one in failed]
    restart = found["restarts"][0]
    assert "was killed by" in restart["lost"]
    assert restart["plan"]["verdict"] == restart["recovery"]["verdict"] == "LOCALIZED"
    assert restart["recovery"]["time"] > restart["time"]


def test_programs_see_a_recovery_that_goes_on_by_its_plan():
    run = run_of()
    found = document(newest_of(run, max(run.facts) / 1e9 + 0.1))
    assert found["restarts"][0]["plan"]["verdict"] == "LOCALIZED"
    assert found["restarts"][0]["recovery"] is None
    assert "restoring" in {one["doing"] for one in found["processes"]}
    json.dumps(found)


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


@pytest.mark.parametrize(
    "event",
    [
        *(EventName.FAULT_DETECTED, EventName.PHASE, EventName.PROTECTION),
        *(EventName.WINDOW_PERSISTED, EventName.RECOVERED),
    ],
)
def test_once_a_damaged_event_is_refused_in_a_line(tmp_path, capsys, event):
    run_of().write(tmp_path / "events")
    damage(tmp_path / "events", event)
    assert main(["watch", "--once", str(tmp_path / "events")]) == ExitCode.BAD_ARGUMENTS
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith(f"moevement watch: {tmp_path / 'events'}: an event is damaged: KeyError")


def test_what_is_damaged_costs_its_own_part_of_a_page_that_lasts():
    run = run_of()
    newest, found = newest_of(run), Damage()
    place = {"logical_rank": 0, "pid": 1, "generation": 9, "iteration": 99}
    events = [
        EventRecord(newest.time_s + 1, event=event, fields={}, **place)
        for event in (EventName.PHASE, EventName.FAULT_DETECTED, EventName.PROTECTION)
    ]
    name = min(newest.processes)
    take_news([(name, event) for event in events], newest, found)
    assert found == Damage(2, f"fault_detected in {name}: KeyError('noticed_s')")
    shown = printed(lasting_page(newest, newest.time_s, found))
    assert shown[0] == f"events that are damaged and left out: 2; the newest: {found.newest}"
    assert shown[1].startswith("run synthetic  step 39  generation 9")
    (not_shown,) = [line for line in shown if "not shown" in line]
    assert not_shown == "protection: not shown, an event is damaged: KeyError('spares')"
    assert any("LOCALIZED" in line for line in shown)


def test_names_in_events_are_text_in_the_page():
    newest = newest_of(run_of())
    for process in newest.processes.values():
        process.host = "[/bold]"
    assert any("[/bold]" in line for line in lines(newest, newest.time_s))


def test_it_goes_on_until_ctrl_c(tmp_path):
    run_of().write(tmp_path / "events")
    with watched(tmp_path / "events") as (watching, reader):
        read_until(reader, b"run synthetic", 3)
        watching.send_signal(signal.SIGINT)
        while read_some(reader):
            pass
        assert watching.wait() == ExitCode.DONE


def test_a_damaged_event_does_not_end_it(tmp_path):
    run_of().write(tmp_path / "events")
    with watched(tmp_path / "events") as (watching, reader):
        read_until(reader, b"run synthetic", 1)
        damage(tmp_path / "events", EventName.FAULT_DETECTED)
        read_until(reader, b"left out: 1", 2)
        assert watching.poll() is None


def test_events_whose_folder_is_made_later_are_shown(tmp_path):
    with watched(tmp_path) as (_, reader):
        read_until(reader, b"run ?", 1)
        tmp_path.rename(tmp_path.with_name("away"))
        read_until(reader, b"run ?", 3)
        run_of().write(tmp_path / "events")
        read_until(reader, b"run synthetic", 1)


@contextlib.contextmanager
def watched(folder):
    """Gives a process that shows a page of a folder, and where to read it."""
    # A shell starts what runs in the background without Ctrl-C.
    python = ["env", "--default-signal=INT", sys.executable]
    command = [*python, "-m", "megatron_moevement.cli", "watch", str(folder)]
    reader, terminal = pty.openpty()
    watching = subprocess.Popen([*command, "--every", "0.05"], stdout=terminal)
    os.close(terminal)
    try:
        yield watching, reader
    finally:
        watching.kill()
        watching.wait()
        os.close(reader)


def read_until(reader, text, count):
    """Reads until it has been shown so often; fails where the page ends before."""
    shown = b""
    while shown.count(text) < count:
        chunk = read_some(reader)
        assert chunk
        shown += chunk


def read_some(reader):
    """Reads from a terminal; nothing once all that write to it have ended."""
    try:
        return os.read(reader, 1 << 16)
    except OSError:
        return b""
