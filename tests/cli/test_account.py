# SPDX-License-Identifier: Apache-2.0
"""`moevement account` prints the account of all launches of a job."""

import json
import re

import pytest

from megatron_moevement.cli import main
from megatron_moevement.errors import ExitCode
from megatron_moevement.policy.job.ranks import Layout
from megatron_moevement.runtime.observation.events import EventLog, EventName
from tests.harness.synthetic_run import Shape, SyntheticRun


@pytest.fixture
def run_dir(tmp_path):
    with EventLog(tmp_path / "events", 0, 0) as events:
        events.emit(EventName.PROCESS_START, 0)
        events.emit(EventName.PHASE, 0, phase="training")
        for step in range(1, 6):
            events.emit(EventName.ITERATION, step, duration_s=1.0, stall_s=0.25)
    return tmp_path / "events"


def test_the_table_has_a_row_for_each_part_and_their_sum(run_dir, capsys):
    assert main(["account", str(run_dir)]) == ExitCode.DONE
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("useful", "stall", "sum", "no fault was noticed"))
    assert "5 steps on 1 rank\n" in printed


@pytest.mark.parametrize("processes", [5, 6])
def test_of_many_processes_the_least_and_the_most_are_shown(
    processes, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    shape = Shape(layout=Layout(pp=2, dp=2), spares=processes - 4, steps=40, faults=1)
    SyntheticRun(shape).write(tmp_path / "events")
    assert main(["account", str(tmp_path / "events"), "--json"]) == ExitCode.DONE
    found = [one["parts_s"] for one in json.loads(capsys.readouterr().out)["processes"]]
    assert main(["account", str(tmp_path / "events")]) == ExitCode.DONE
    lines = [line for line in capsys.readouterr().out.splitlines() if line[0] in "│┃"]
    head, *rows = ([cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in lines)
    shown = {name: own for name, *own, _, _ in rows}
    for part in ("useful", "lost", "spare", "gone"):
        own = [one.get(part, 0.0) for one in found]
        if processes == 6:
            own = [min(own), max(own)]
        assert shown[part] == [f"{one_s:.2f}" if one_s else "" for one_s in own]
    names = ["least of 6", "most of 6"] if processes == 6 else [f"p{rank}" for rank in range(5)]
    assert head == ["part (s)", *names, "all", "share"]


def test_the_document_adds_up(run_dir, capsys):
    assert main(["account", "--json", str(run_dir)]) == ExitCode.DONE
    document = json.loads(capsys.readouterr().out)
    (process,) = document["processes"]
    assert sum(process["parts_s"].values()) == pytest.approx(document["wall_s"], abs=1e-9)
    assert document["steps"] == 5


def test_folders_without_events_are_refused(tmp_path, capsys):
    assert main(["account", str(tmp_path)]) == ExitCode.BAD_ARGUMENTS
    assert main(["account", str(tmp_path / "none")]) == ExitCode.BAD_ARGUMENTS
    assert [line.count("moevement account: ") for line in capsys.readouterr().err.splitlines()] == [
        1,
        1,
    ]
