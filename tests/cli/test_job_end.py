# SPDX-License-Identifier: Apache-2.0
"""The line that a launcher ends a job with: why, and what to do."""

import json
import os
import signal
import subprocess
import sys
from datetime import timedelta

import pytest

from megatron_moevement.cli import main
from megatron_moevement.cli.job_end import describe_status, event_dir_of
from megatron_moevement.errors import ExitCode, UserError
from megatron_moevement.runtime.coordination.meeting import store_at
from megatron_moevement.runtime.coordination.roll_call import RollCall
from megatron_moevement.runtime.observation.events import EventLog, EventName, read_events
from megatron_moevement.settings.secret import Secret


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (-signal.SIGKILL, "was killed by SIGKILL"),
        (-signal.SIGSEGV, "was killed by SIGSEGV"),
        (-64 - 1, "was killed by signal 65"),
        (75, "ended with exit code 75 (it stopped with its state kept)"),
        (130, "ended with exit code 130 (Ctrl-C)"),
        (1, "ended with exit code 1 (it failed)"),
        (0, "ended with exit code 0"),
    ],
)
def test_a_process_ends_by_a_signal_or_a_code(status, told):
    assert describe_status(status) == told


def test_the_folder_of_events_is_that_of_the_flags_or_else_of_their_yaml(tmp_path, monkeypatch):
    monkeypatch.setenv("RUNS", "/runs")
    for name, text in (
        ("first", "moevement_event_dir: /first"),
        ("second", "logging:\n  moevement_event_dir: ${RUNS}/events"),
        ("other", "seed: 3"),
    ):
        (tmp_path / name).write_text(text)
    yaml = ["--seed", "3", "--yaml-cfg", *(str(tmp_path / name) for name in ("first", "second"))]
    assert event_dir_of(yaml) == "/runs/events"
    assert event_dir_of([*yaml, "--moevement-event-dir=/own"]) == "/own"
    assert event_dir_of(["--yaml-cfg", str(tmp_path / "other")]) is None
    assert event_dir_of(["--seed", "3"]) is None
    with pytest.raises(UserError, match=r"--yaml-cfg .*missing"):
        event_dir_of(["--yaml-cfg", str(tmp_path / "missing")])


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Returns a folder of events, with the environment of a process of a launch."""
    for name, value in (("MOEVEMENT_LAUNCH", "a"), ("RANK", "3"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    with EventLog(tmp_path / "events", 0, 0) as events:
        events.emit(EventName.PROCESS_START, 0)
    return tmp_path / "events"


@pytest.mark.parametrize(
    ("code", "status"), [(137, -9), (139, -11), (1, 1), (130, 130), (128, 128)]
)
def test_another_launcher_records_how_a_process_ended(launched, code, status):
    flags = ["--", "--seed", "3", "--moevement-event-dir", str(launched)]
    assert main(["ended", "--code", str(code), "--begun", "12.5", *flags]) == ExitCode.DONE
    (end,) = (one for one in read_events(launched) if one.event is EventName.PROCESS_END)
    told = {name: end.fields[name] for name in ("launch", "process", "code", "started_s", "child")}
    assert told == {"launch": "a", "process": 3, "code": status, "started_s": 12.5, "child": None}


def test_an_end_is_noted_for_the_processes_that_go_on(launched, monkeypatch, capsys):
    secret = "s" * 32
    command = [sys.executable, "-m", "megatron_moevement.cli", "stores", "--interface", "127.0.0.1"]
    command += ["--port", "0", "--processes", "4"]
    environment = os.environ | {"MOEVEMENT_SECRET": secret}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as stores:
        printed = dict(word.partition("=")[::2] for word in stores.stdout.readline().split())
        port = printed["MOEVEMENT_CONTROL_PORT"]
        for name, value in (
            ("MASTER_ADDR", "127.0.0.1"),
            ("MOEVEMENT_CONTROL_PORT", port),
            ("MOEVEMENT_SECRET", secret),
        ):
            monkeypatch.setenv(name, value)
        assert main(["ended", "--code", "137", "--json", "--"]) == ExitCode.DONE
        assert json.loads(capsys.readouterr().out)["noted"] is True
        control = store_at(("127.0.0.1", int(port)), timedelta(seconds=10))
        patience = timedelta(seconds=60)
        roll = RollCall(0, 4, secret=Secret(secret.encode()), attempt="0", patience=patience)
        assert roll.ends(control, ()) == {3: "was killed by SIGKILL"}
        stores.terminate()
    assert main(["ended", "--code", "137", "--"]) == ExitCode.DONE  # nobody serves it now


@pytest.mark.parametrize("folder", ["events", "of no process"])
def test_programs_learn_where_an_end_was_recorded(launched, capsys, folder):
    events = str(launched.parent / folder)
    flags = ["ended", "--code", "137", "--json", "--", "--moevement-event-dir", events]
    assert main(flags) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out) == {
        "launch": "a",
        "process": 3,
        "code": -9,
        "end": "was killed by SIGKILL",
        "event_dir": events if folder == "events" else None,
        "noted": False,
    }


def test_an_end_of_no_launch_or_with_no_code_is_refused(launched, monkeypatch, capsys):
    assert main(["ended", "--code", "256", "--"]) == ExitCode.BAD_ARGUMENTS
    monkeypatch.delenv("MOEVEMENT_LAUNCH")
    assert main(["ended", "--code", "137", "--"]) == ExitCode.BAD_ARGUMENTS
    refused = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in refused] == ["moevement ended"] * 2
    assert "MOEVEMENT_LAUNCH" in refused[1]
