# SPDX-License-Identifier: Apache-2.0
"""`moevement status EVENT_DIR`: the newest of all events of ranks, whoever recorded it."""

import json

import pytest

from megatron_moevement.cli import main
from megatron_moevement.errors import ExitCode
from megatron_moevement.runtime.observation.events import EventLog, EventName

EDGE = {"start": 6, "size": 3, "lag": 1, "copies": 1}
TOLD = {"level": "full", "wanted": 1, "spares": None, "costs": ["a loss ends the job"]}


def test_the_newest_of_each_kind_counts_and_an_end_has_no_generation(tmp_path, capsys):
    with EventLog(tmp_path, 0, 0) as events:  # a generation whose newest steps were lost
        events.emit(EventName.ITERATION, 14)
    with EventLog(tmp_path, 0, 1) as events:
        for start in (3, 6):
            events.emit(EventName.WINDOW_PERSISTED, start + 4, **EDGE | {"start": start})
        events.emit(EventName.ITERATION, 10, steps=5)
        events.emit(EventName.PROTECTION, 10, **EDGE, **TOLD)
    with EventLog(tmp_path, 1, 1) as events:
        events.emit(EventName.ITERATION, 9, steps=4)
    with EventLog(tmp_path, -1, 0) as events:
        events.emit(EventName.PROCESS_END, 0, code=0)
    assert main(["status", "--json", str(tmp_path)]) == ExitCode.DONE
    document = json.loads(capsys.readouterr().out)
    assert (document["generation"], document["step"]) == (1, 10)
    assert document["window"]["start"] == 6
    assert main(["status", str(tmp_path)]) == ExitCode.DONE
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("generation 1, step 10 (")
    assert first.endswith("window 6 to 8 persisted with a lag of 1")
    assert second == "protection: full, 1 of 1 copies; a loss ends the job"


def recovered(folder, rank, generation, target):
    with EventLog(folder, rank, generation) as events:
        events.emit(
            EventName.RECOVERED,
            target,
            verdict="LOCALIZED",
            scope=[1],
            guarantee="EXACT",
            replayed_steps=0,
            replay_proof=None,
            breakdown_s={"plan": 0.25, "wait": 0.0},
            owed_copies=0,
        )


@pytest.mark.parametrize("is_protected", [True, False])
def test_the_newest_recovery_is_a_line_as_recoveries_has_it(tmp_path, capsys, is_protected):
    for generation, target in ((1, 9), (2, 12)):
        for rank in (1, 0):
            recovered(tmp_path, rank, generation, target)
    if is_protected:
        with EventLog(tmp_path, 0, 2) as events:
            events.emit(EventName.WINDOW_PERSISTED, 10, **EDGE)
            events.emit(EventName.PROTECTION, 10, **TOLD)
    assert main(["recoveries", str(tmp_path)]) == ExitCode.DONE
    *_, newest = capsys.readouterr().out.splitlines()
    assert main(["status", str(tmp_path)]) == ExitCode.DONE
    _, _, line = capsys.readouterr().out.splitlines()
    assert line == f"newest recovery: {newest}"
    assert "generation 2: LOCALIZED, stage 1 replayed 0 steps" in line
    assert main(["recoveries", "--json", str(tmp_path)]) == ExitCode.DONE
    listed = json.loads(capsys.readouterr().out)["recoveries"]
    assert main(["status", "--json", str(tmp_path)]) == ExitCode.DONE
    document = json.loads(capsys.readouterr().out)
    assert (document["recovery"], document["open_fault"]) == (listed[-1], None)


def test_a_fault_after_the_newest_recovery_has_a_line(tmp_path, capsys):
    recovered(tmp_path, 0, 1, 9)
    with EventLog(tmp_path, 0, 2) as events:
        events.emit(EventName.FAULT_DETECTED, 12)
    assert main(["status", str(tmp_path)]) == ExitCode.DONE
    *_, recovery, fault = capsys.readouterr().out.splitlines()
    assert recovery.startswith("newest recovery: ")
    assert fault.endswith("generation 2: a fault was noticed, and no recovery has ended since")
    assert main(["status", "--json", str(tmp_path)]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out)["open_fault"] == fault.partition(" ")[0]


@pytest.mark.parametrize("lacking", ["level", "wanted", "spares", "costs", "start", "copies"])
def test_a_damaged_event_is_refused_in_a_line(tmp_path, capsys, lacking):
    with EventLog(tmp_path, 0, 1) as events:
        for event, fields in ((EventName.PROTECTION, TOLD), (EventName.WINDOW_PERSISTED, EDGE)):
            events.emit(event, 10, **{name: fields[name] for name in fields if name != lacking})
    assert main(["status", str(tmp_path)]) == ExitCode.BAD_ARGUMENTS
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == (
        f"moevement status: {tmp_path}: an event is damaged: KeyError('{lacking}')\n"
    )


def test_a_folder_without_events_of_ranks_is_refused(tmp_path, capsys):
    with EventLog(tmp_path, -1, 0) as events:
        events.emit(EventName.PROCESS_END, 0, code=1)
    assert main(["status", str(tmp_path)]) == ExitCode.BAD_ARGUMENTS
    assert "has no events of ranks yet" in capsys.readouterr().err
