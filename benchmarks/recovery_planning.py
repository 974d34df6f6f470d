# SPDX-License-Identifier: Apache-2.0
"""How long a recovery of 16,384 ranks takes to plan, on one core.

Run `python benchmarks/recovery_planning.py`. Each row is one fault of a job of PP 64, DP 32, EP 8.
Times are of the process (CPU seconds) for `plan_recovery` and the digest of its plan, with
nothing derived from the facts before: the slowest and the median repetition.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_moevement.policy.facts.facts import Facts
from megatron_moevement.policy.job.ranks import Layout, LogicalRank
from megatron_moevement.policy.job.segments import Ends
from megatron_moevement.policy.recovery.plan import Plan
from megatron_moevement.policy.recovery.recovery_planner import plan_recovery

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where tests.harness is

from tests.harness.job_facts import (
    Interrupt,
    Job,
    interrupted,
    without_log_steps,
    without_processes,
)

TARGET_S = 1.0
PER_NODE = 8
WINDOW = 6


@dataclasses.dataclass(frozen=True)
class Case:
    """A fault, as facts."""

    name: str
    facts: Facts


def build_cases(layout: Layout) -> Iterator[Case]:
    """Yields faults from the smallest to what takes all stages back."""
    stage = layout.ranks_per_stage
    job = Job(
        layout,
        step=12 * WINDOW + WINDOW - 2,
        window=WINDOW,
        spares=layout.pp * PER_NODE,
        processes_per_domain=PER_NODE,
        ends=Ends.TIED,
        durable=0,
    )
    healthy = job.facts()
    yield Case("none lost, a node behind", dataclasses.replace(job, behind=_node(layout)).facts())
    one = without_processes(healthy, range(PER_NODE))
    yield Case("a node of a tied end", one)
    stages = range(0, layout.num_ranks, 2 * stage)
    yield Case("a node of every other stage", _lost_nodes(healthy, stages))
    everywhere = _lost_nodes(healthy, range(0, layout.num_ranks, stage))
    yield Case("a node of every stage", everywhere)
    yield Case("a node, and no log is whole", _without_logs(one, layout, job.step))
    plan = plan_recovery(everywhere)
    reached = {replay.stage: min(replay.start + 3, plan.target) for replay in plan.replays}
    cut = interrupted(everywhere, plan, Interrupt(reached))
    yield Case("the recovery of every stage cut", without_processes(cut, range(PER_NODE)))


def _node(layout: Layout) -> frozenset[LogicalRank]:
    return frozenset(layout.ranks[:PER_NODE])


def _lost_nodes(facts: Facts, firsts: Sequence[int]) -> Facts:
    return without_processes(facts, {first + i for first in firsts for i in range(PER_NODE)})


def _without_logs(facts: Facts, layout: Layout, step: int) -> Facts:
    for process in range(PER_NODE, layout.num_ranks, layout.ranks_per_stage):
        facts = without_log_steps(facts, process, {step - 1})
    return facts


def measure(case: Case, repetitions: int) -> tuple[Plan, list[float]]:
    """Returns the plan and the CPU seconds of each repetition."""
    seconds = []
    for _ in range(repetitions):
        layout = dataclasses.replace(case.facts.layout)
        facts = dataclasses.replace(case.facts, layout=layout)
        start = time.process_time()
        plan = plan_recovery(facts)
        assert plan.digest
        seconds.append(time.process_time() - start)
    return plan, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    layout = Layout(pp=64, dp=32, ep=8)
    table = Table(title=f"{layout.num_ranks} ranks; the bound is {TARGET_S} s", box=None)
    for title in ("fault", "verdict", "stages", "slots", "slowest s", "median s"):
        table.add_column(title, justify="left" if title == "fault" else "right")
    for case in build_cases(layout):
        plan, seconds = measure(case, args.repetitions)
        table.add_row(
            case.name,
            plan.verdict.value,
            str(len(plan.replays)),
            str(sum(1 for _ in plan.slot_fetches())),
            f"{max(seconds):.3f}",
            f"{statistics.median(seconds):.3f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
