# SPDX-License-Identifier: Apache-2.0
"""What is said to be captured of each operator, beside what a real run captures."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from megatron_moevement.policy.job.operators import Inventory, OperatorKind
from megatron_moevement.policy.job.ranks import Layout, LogicalRank
from megatron_moevement.policy.window.ordering import Ordering, order_operators
from megatron_moevement.policy.window.packing import Levelled
from megatron_moevement.policy.window.schedule_document import dump_schedule, load_schedule
from megatron_moevement.policy.window.window_planner import plan_window
from megatron_moevement.runtime.observation.events import EventName, read_events
from tests.harness.default_run import slow_but
from tests.harness.interruption import Run
from tests.harness.protected_run import Case
from tests.harness.tiny_job import TINY

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
CASES = {
    Case.of("edp3 fp16 distributed bias", 3): Layout(pp=1, dp=3),
    Case.of("vpp2 bf16 replicated grouped", 2): Layout(pp=2, dp=1, chunks=2),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_run_captures_in_each_step_what_the_table_says(
    megatron_fork_server, text, tmp_path, case
):
    run = Run(case.protected_program(megatron_fork_server, text), tmp_path)
    file = tmp_path / "operators.json"
    with run.start(f"--moevement-operators={file}") as job:
        job.wait().check()
    assert not run.store.exists()
    assert not run.checkpoints.exists()
    document = json.loads(file.read_text())
    run.finish()
    captured = defaultdict(dict)
    for event in read_events(run.events):
        if event.event is EventName.ITERATION:
            captured[event.logical_rank][event.iteration] = event.fields["captured_bytes"]
    for process in range(case.combination.world_size):
        rank = str(CASES[case].rank_at(process))
        slots = [
            sum(
                full if document["slots"][name] == slot else compute
                for name, (full, compute) in document["ranks"][rank].items()
                if document["slots"][name] >= slot
            )
            for slot in range(case.window)
        ]
        assert slots == document["slot_bytes"][rank]
        steps = range(1, case.train_iters + 1)
        assert captured[process] == {step: slots[step % case.window] for step in steps}


def operators(*arguments):
    """Runs the command by itself; returns how it ended."""
    return subprocess.run(
        [sys.executable, "-m", "megatron_moevement.cli", "operators", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def lines(ended):
    assert ended.returncode == 0, ended.stderr
    return [" ".join(line.split()) for line in ended.stdout.splitlines()]


BF16 = (*TINY, "--bf16", "--num-layers=1", "--num-experts=12")


@pytest.fixture(scope="module")
def one_rank():
    """Returns the schedule of a job of one rank, as the command tells it to programs."""
    ended = operators("--json", "--", *BF16, "--moevement-window=3")
    assert ended.returncode == 0, ended.stderr
    schedule = load_schedule(ended.stdout, "the command")
    assert dump_schedule(schedule) == ended.stdout
    return schedule


@pytest.mark.parametrize("window", slow_but((4,), (1, 2, 3, 4, 6)))
def test_equal_operators_take_what_the_formula_says(one_rank, window):
    """Bytes per parameter in slot j: 12 / W + 2 (W - j - 1) / W."""
    experts = tuple(
        one
        for one in one_rank.inventory.by_rank[LogicalRank()]
        if one.id.kind is OperatorKind.EXPERT
    )
    inventory = Inventory({LogicalRank(): experts})
    order = order_operators(inventory.sorted_operators, Ordering.INDEX)
    schedule = plan_window(inventory, order, window=window, levelled=Levelled.FULL).schedule
    parameters = 12 * 3 * 32 * 32  # experts, matrices of a gated MLP
    assert schedule.bytes_by_slot[LogicalRank()] == tuple(
        parameters // window * (12 + 2 * (window - slot - 1)) for slot in range(window)
    )


@pytest.mark.slow
def test_the_table_shows_one_rank(one_rank):
    (heading, _, *rows) = lines(operators("--", *BF16, "--moevement-window=3"))
    own = one_rank.inventory.by_rank[LogicalRank()]
    count = len(own)
    assert heading.startswith(f"pp0.dp0.tp0.cp0.ep0: {count} operators, W = 3, digest ")
    names = {str(one.id): one for one in own}
    for row in rows[:count]:
        name, *_, full, compute, slot = row.split()
        one = names.pop(name)
        assert (full, compute) == (f"{one.full_bytes:,}", f"{one.compute_bytes:,}")
        assert int(slot) == one_rank.slots[one.id]
    assert not names
    slots = one_rank.bytes_by_slot[LogicalRank()]
    assert [row.split()[-1] for row in rows[count + 1 :]] == [f"{each:,}" for each in slots]


@pytest.mark.slow
def test_the_ranks_of_a_job_are_started_and_one_of_them_is_chosen():
    flags = (*TINY, "--pipeline-model-parallel-size=2", "--moevement-host-memory-limit-gb=1e-9")
    (heading, _, *rows) = lines(operators("-n", "2", "--rank", "pp1.dp0.tp0.cp0.ep0", "--", *flags))
    assert heading.startswith("pp1.dp0.tp0.cp0.ep0: 7 operators, W = 4")
    assert {row.split()[0] for row in rows[:7]} == {
        *(f"layers.1.experts.{expert}" for expert in range(4)),
        *("layers.1.gate", "layers.1.rest", "head"),
    }


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--rank", "pp7", "--", *TINY), "--rank pp7: the job has pp0.dp0.tp0.cp0.ep0"),
        (("--", *TINY, "--num-layers=0"), "moevement operators: "),
    ],
)
def test_bad_input_is_told_in_one_line(arguments, line):
    ended = operators(*arguments)
    assert ended.returncode == 2
    assert line in ended.stderr
    assert "Traceback" not in ended.stderr
