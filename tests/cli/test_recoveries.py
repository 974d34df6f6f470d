# SPDX-License-Identifier: Apache-2.0
"""`moevement recoveries`, on events of recoveries that are written down here."""

from datetime import datetime

import pytest

from megatron_moevement.cli import main
from megatron_moevement.policy.outcome.replay_proof import Compared, ReplayProof
from megatron_moevement.runtime.observation.events import EventLog, EventName


def told(folder, rank, *, verdict="LOCALIZED", verified=True, generation=1, target=9):
    """Writes what a rank tells of a recovery."""
    proof = ReplayProof(Compared(5), Compared(7, int(not verified)), targets=1)
    with EventLog(folder, rank, generation) as events:
        events.emit(
            EventName.RECOVERED,
            target,
            verdict=verdict,
            scope=[1],
            guarantee="EXACT",
            replayed_steps=5 * (rank > 0),
            replay_verified=verified if rank > 0 else None,
            replay_proof=proof.document() if rank > 0 else None,
            breakdown_s={"teardown": 0.5, "plan": 0.25, "replay": 2.0 * rank, "wait": 2.0 - rank},
            owed_copies=0,
        )


def recoveries(folder, *flags):
    return main(["recoveries", str(folder), *flags])


def test_each_recovery_is_one_line(tmp_path, capsys):
    for generation, target in ((1, 9), (2, 9), (3, 14), (3, 14)):
        for rank in (1, 0):
            told(tmp_path, rank, generation=generation, target=target)
    assert recoveries(tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(datetime.fromisoformat(line.partition(" ")[0]).tzinfo for line in lines)
    lines = [line.partition(" ")[2] for line in lines]
    assert [line.partition(",")[0] for line in lines] == [
        f"generation {generation}: LOCALIZED" for generation in (1, 2, 3, 3)
    ]
    assert lines[0] == (
        "generation 1: LOCALIZED, stage 1 replayed 5 steps (5 steps' scalars, "
        "7 sent tensors equal; final state compared on 1 of 1 ranks), resumed at step 9, "
        "3.8 s (teardown 0.5, plan 0.2, replay 2.0, wait 1.0), guarantee EXACT"
    )


def test_what_is_required_decides_the_exit_code(tmp_path, capsys):
    (tmp_path / "none").mkdir()
    told(tmp_path / "good", 0)
    told(tmp_path / "good", 1)
    told(tmp_path / "global", 1, verdict="GLOBAL")
    told(tmp_path / "wrong", 0)
    told(tmp_path / "wrong", 1, verified=False)
    require = ("--require", "LOCALIZED")
    assert recoveries(tmp_path / "good", *require) == 0
    for name in ("none", "global", "wrong"):
        assert recoveries(tmp_path / name) == 0
        capsys.readouterr()
        assert recoveries(tmp_path / name, *require) == 1
        assert "is required" in capsys.readouterr().err


def test_a_run_without_a_fault_says_so(tmp_path, capsys):
    assert recoveries(tmp_path) == 0
    assert capsys.readouterr().out == (
        f"no recovery in {tmp_path}: no process met others again after a fault\n"
    )


def test_a_fault_that_no_recovery_ended_is_told(tmp_path, capsys):
    told(tmp_path, 0)
    with EventLog(tmp_path, 0, 2) as events:
        events.emit(EventName.FAULT_DETECTED, 12)
    assert recoveries(tmp_path) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "LOCALIZED" in first
    assert second.endswith("generation 2: a fault was noticed, and no recovery has ended since")


def test_a_folder_that_is_not_there_is_bad_input(tmp_path, capsys):
    assert recoveries(tmp_path / "nowhere") == 2
    assert "--moevement-event-dir" in capsys.readouterr().err


def test_a_damaged_event_is_refused_in_a_line(tmp_path, capsys):
    with EventLog(tmp_path, 0, 1) as events:
        events.emit(EventName.RECOVERED, 9)
    assert recoveries(tmp_path) == 2
    damaged = f"{tmp_path}: an event is damaged: KeyError('verdict')"
    assert capsys.readouterr().err == f"moevement recoveries: {damaged}\n"


def test_an_unknown_verdict_is_bad_input(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        recoveries(tmp_path, "--require", "MAGIC")
    assert ended.value.code == 2
    assert "LOCALIZED" in capsys.readouterr().err
