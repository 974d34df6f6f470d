# SPDX-License-Identifier: Apache-2.0
"""`moevement explain`: verdict, reason, a row for each stage, and clear refusals."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_moevement.cli import main
from megatron_moevement.policy.facts.facts import Condition, LiveState
from megatron_moevement.policy.facts.facts_document import FACTS, dump_facts, load_facts
from megatron_moevement.policy.job.ranks import Layout, LogicalRank
from megatron_moevement.policy.recovery.recovery_planner import plan_recovery
from megatron_moevement.runtime.observation.events import EventLog
from tests.harness.job_facts import (
    Interrupt,
    Job,
    changed,
    interrupted,
    with_replicas,
    without_log_steps,
    without_processes,
)

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "facts.json"
JOB = Job(Layout(pp=4, dp=2), step=13)


@pytest.fixture
def explain(tmp_path, capsys, monkeypatch):
    """Returns a function that gives the lines that are printed for facts."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(facts):
        path = tmp_path / "facts.json"
        path.write_text(dump_facts(facts), encoding="utf-8")
        assert main(["explain", str(path)]) == 0
        captured = capsys.readouterr()
        assert not captured.err
        return [line.rstrip() for line in captured.out.splitlines()]

    return run


def rows_of(lines):
    """Returns what each stage does, by the stage."""
    return {
        int(line.split()[0]): " ".join(line.split()[1:])
        for line in lines
        if line[:5].strip().isdigit()
    }


def test_a_stage_that_lost_a_rank_replays_between_two_that_serve(explain):
    lines = explain(without_processes(JOB.facts(), {2}))
    rows = rows_of(lines)
    assert lines[0] == "LOCALIZED: stage 1 lost state; from the window of step 9"
    assert "replay from the window of steps 9 to 11 (epoch 0)" in lines
    assert "scope single-stage: 1" in lines
    assert rows[0] == rows[2] == "bystander, serves logs"
    assert rows[3] == "bystander"
    assert rows[1].startswith("replays (9, 13] from the window 0..2 own x3, ")
    assert rows[1].endswith("0 forward: 10..13, 2 backward: 10..13")
    assert "training goes on with step 14; no work is lost" in lines


def test_a_copy_from_a_replica_is_told_with_its_source(explain):
    lines = explain(with_replicas(without_processes(JOB.facts(), {2})))
    rows = rows_of(lines)
    assert lines[0] == "COPIED: stage 1 lost state of 1 rank, replicas hold step 13"
    assert "nothing is replayed" in lines[1]
    assert rows == dict.fromkeys((0, 2, 3), "keeps S_13") | {1: "copies S_13 where it is lost"}
    assert "copied: pp1.dp0.tp0.cp0.ep0 from p3" in lines
    assert "training goes on with step 14; no work is lost" in lines


def test_the_slots_of_a_new_process_come_from_named_holders(explain):
    facts = without_processes(JOB.facts(), {2})
    plan = plan_recovery(facts)
    newcomer = facts.by_rank[LogicalRank(1, 0)]
    sources = [fetch.source for fetch in plan.fetches_of(LogicalRank(1, 0))]
    lines = explain(facts)
    assert newcomer.process not in sources
    for process in set(sources):
        assert f"p{process} x{sources.count(process)}" in rows_of(lines)[1]


def test_stages_that_go_on_from_where_they_were_say_so(explain):
    first = without_processes(JOB.facts(), {2})
    plan = plan_recovery(first)
    again = interrupted(first, plan, Interrupt({1: 12}))
    lines = explain(without_processes(again, {7}))
    rows = rows_of(lines)
    assert "scope disjoint-segments: 1, 3" in lines
    assert rows[1].startswith("replays (12, 13] from its kept S_12 ")
    assert rows[3].startswith("replays (9, 13] from the window ")


def test_ranks_that_roll_forward_are_named_and_nobody_replays(explain):
    behind = frozenset({LogicalRank(1, 1), LogicalRank(3, 0)})
    lines = explain(dataclasses.replace(JOB, behind=behind).facts())
    assert lines[0] == "RESUME: all ranks hold step 13, 2 ranks roll forward to it"
    assert set(rows_of(lines).values()) == {"keeps S_13"}
    assert "roll forward to 13: pp1.dp1.tp0.cp0.ep0, pp3.dp0.tp0.cp0.ep0" in lines


def test_many_ranks_are_counted_instead_of_named(explain):
    job = Job(Layout(pp=2, dp=8), step=13)
    behind = frozenset(job.layout.stage_ranks(0))
    lines = explain(dataclasses.replace(job, behind=behind).facts())
    assert any(line.startswith("roll forward to 13") and "and 4 more" in line for line in lines)


def test_a_rank_without_a_process_is_named(capsys, tmp_path):
    facts = Job(Layout(pp=2), step=13).facts()
    path = tmp_path / "facts.json"
    text = dump_facts(dataclasses.replace(facts, processes=facts.processes[1:]))
    path.write_text(text, encoding="utf-8")
    assert main(["explain", str(path)]) == 2
    assert "no process has pp0.dp0.tp0.cp0.ep0" in capsys.readouterr().err


def test_a_rollback_says_which_step_is_loaded_and_that_work_is_lost(explain):
    lines = explain(without_processes(Job(Layout(pp=2), step=1, durable=1).facts(), {0}))
    assert lines[0].startswith("ROLLBACK: ")
    assert set(rows_of(lines).values()) == {"loads the checkpoint of step 1"}
    assert "training goes on with step 2; later work is lost" in lines


def test_the_example_is_canonical_and_shows_a_scope_that_grew(capsys):
    text = EXAMPLE.read_text(encoding="utf-8")
    assert dump_facts(load_facts(text, "example")) == text
    assert main(["explain", str(EXAMPLE)]) == 0
    output = capsys.readouterr().out
    assert output.startswith("LOCALIZED: stage 1 lost state; stage 2 joined")
    assert "scope adjacent-segment: 1-2" in output


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"{", b"{}"])
def test_a_file_that_is_no_facts_is_refused_in_one_line(content, tmp_path, capsys):
    path = tmp_path / "facts.json"
    if content is not None:
        path.write_bytes(content)
    assert main(["explain", str(path)]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.startswith("moevement explain: ")
    assert str(path) in captured.err
    assert captured.err.count("\n") == 1


def test_facts_that_break_the_protocol_are_refused_in_one_line(tmp_path, capsys):
    facts = JOB.facts()
    slow = facts.processes[3]
    live = dataclasses.replace(slow.live, step=11)
    facts = changed(facts, {3: dataclasses.replace(slow, committed=11, live=live)})
    path = tmp_path / "facts.json"
    path.write_text(dump_facts(facts), encoding="utf-8")
    assert main(["explain", str(path)]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert "pp1.dp1.tp0.cp0.ep0" in captured.err
    assert captured.err.count("\n") == 1


def test_another_hash_seed_gives_the_same_plan(tmp_path):
    facts = without_log_steps(without_processes(JOB.facts(), {2, 6}), 5, {11})
    path = tmp_path / "facts.json"
    path.write_text(dump_facts(facts), encoding="utf-8")
    command = [sys.executable, "-m", "megatron_moevement.cli", "explain", str(path)]
    outputs = {
        subprocess.run(
            command,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_who_lost_what_is_told(explain):
    job = dataclasses.replace(JOB, behind=frozenset({LogicalRank(1, 1)}))
    lines = explain(without_processes(job.facts(), {2}))
    lost = [line for line in lines if line.startswith("lost: ")]
    assert len(lost) == 1
    assert lost[0].startswith("lost: the live state of pp1.dp0.tp0.cp0.ep0 (p8 on ")
    assert lost[0].endswith("; no slot of its own is left")
    assert any(line.startswith("behind: pp1.dp1.tp0.cp0.ep0 (p3 on ") for line in lines)


def test_a_folder_of_events_has_all_recoveries_in_the_order_of_time(tmp_path, capsys):
    with EventLog(tmp_path, logical_rank=0, generation=1) as events:
        events.keep(FACTS, dump_facts(without_processes(JOB.facts(), {2})))
        events.keep(FACTS, dump_facts(with_replicas(without_processes(JOB.facts(), {2}))))
    assert main(["explain", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert output.count(f"--- {tmp_path}/") == 2
    assert output.index("LOCALIZED: stage 1") < output.index("COPIED: stage 1")


def test_a_start_with_nothing_in_memory_is_told(tmp_path, capsys):
    facts = without_processes(JOB.facts(), {2})
    nothing = tuple(
        dataclasses.replace(one, committed=None, live=LiveState(Condition.ABSENT), holdings=())
        for one in facts.processes
    )
    path = tmp_path / "facts.json"
    said = (
        "nothing in memory is newer than the initial weights",
        "ROLLBACK: nothing is left in memory",
    )
    for generation, line in enumerate(said):
        changes = {"durable": 0, "processes": nothing, "generation": generation}
        path.write_text(dump_facts(dataclasses.replace(facts, **changes)))
        assert main(["explain", str(path)]) == 0
        assert line in capsys.readouterr().out


def test_a_folder_without_facts_is_refused(tmp_path, capsys):
    assert main(["explain", str(tmp_path)]) == 2
    assert "holds no facts of a recovery" in capsys.readouterr().err
