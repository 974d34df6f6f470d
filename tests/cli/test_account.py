# SPDX-License-Identifier: Apache-2.0
"""`moevement account` prints the account of all launches of a job."""

import json

import pytest

from megatron_moevement.cli import main
from megatron_moevement.errors import ExitCode
from megatron_moevement.runtime.observation.events import EventLog, EventName


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
