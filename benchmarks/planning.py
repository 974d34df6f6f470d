# SPDX-License-Identifier: Apache-2.0
"""How long it takes to plan windows for 100,000 operators, on one core.

Run `python benchmarks/planning.py`. Each row is one inventory; a plan is everything that has to
happen at a window edge: ordering by popularity, W from a budget, packing, checking, digest. Times
are of the process (CPU seconds), the first run with nothing cached and the median of the others,
where it is known already which ranks share what.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import random
import statistics
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from megatron_moevement.policy.job.model_shape import Capture, ModelShape, inventory_of
from megatron_moevement.policy.job.operators import Inventory, Operator, OperatorId
from megatron_moevement.policy.job.ranks import Layout
from megatron_moevement.policy.job.state_recipe import RECIPES, Content, NumberType
from megatron_moevement.policy.window.ordering import Ordering, order_operators
from megatron_moevement.policy.window.window_planner import WindowPlan, plan_window

NUM_LAYERS = 96
NUM_EXPERTS = 1040
TARGET_S = 0.5


@dataclasses.dataclass(frozen=True)
class Case:
    """An inventory to plan for."""

    name: str
    inventory: Inventory


def build_cases(seed: int) -> Sequence[Case]:
    """Returns the inventories, all of 100,034 operators."""
    shape = ModelShape(
        NUM_LAYERS,
        hidden_size=2048,
        ffn_hidden_size=0,
        vocab_size=102_400,
        num_experts=NUM_EXPERTS,
        moe_ffn_hidden_size=1408,
    )
    alone = inventory_of(shape, Layout(), Capture.WHOLE)
    stages = inventory_of(shape, Layout(pp=12, ep=8), Capture.SHARD)
    replicas = inventory_of(shape, Layout(pp=12, ep=8, dp=2), Capture.SHARD)
    return [
        Case("1 rank", alone),
        Case("12 x 1 x 8", stages),
        Case("12 x 2 x 8", replicas),
        Case("12 x 1 x 8, unequal", _made_unequal(stages, seed)),
        Case("12 x 2 x 8, unequal", _made_unequal(replicas, seed)),
    ]


def _made_unequal(inventory: Inventory, seed: int) -> Inventory:
    """Gives every operator on every rank a random share of what it weighed."""
    generator = random.Random(seed)
    recipe = RECIPES[NumberType.BF16]
    full, compute = map(recipe.bytes_per_parameter, (Content.FULL, Content.COMPUTE))

    def part(operator: Operator) -> Operator:
        parameters = operator.compute_bytes // compute * generator.randint(20, 100) // 100
        return Operator(operator.id, full * parameters, compute * parameters)

    return Inventory(
        {rank: tuple(map(part, operators)) for rank, operators in inventory.by_rank.items()},
        inventory.tied,
    )


def plan(inventory: Inventory, popularity: dict[OperatorId, float], budget: int) -> WindowPlan:
    order = order_operators(inventory.sorted_operators, Ordering.HARD, popularity)
    planned = plan_window(inventory, order, budget_bytes=budget)
    assert planned.schedule.digest
    return planned


def measure(case: Case, seed: int, repetitions: int) -> tuple[WindowPlan, list[float]]:
    """Returns a plan and the CPU seconds of each repetition."""
    generator = random.Random(seed)
    inventory = Inventory(case.inventory.by_rank, case.inventory.tied)
    popularity = {
        operator: float(generator.randint(0, 100_000))
        for operator in case.inventory.sorted_operators
        if operator.expert is not None
    }
    full = [sum(op.full_bytes for op in ops) for ops in inventory.by_rank.values()]
    gc.collect()  # what setting up the cases left behind is not planning's to look through
    gc.freeze()
    seconds = []
    for _ in range(repetitions):
        start = time.process_time()
        planned = plan(inventory, popularity, max(full) // 3)
        seconds.append(time.process_time() - start)
    return planned, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    table = Table(title=f"planning; the bound is {TARGET_S} s", box=None)
    for title in ("PP x DP x EP", "operators", "shards", "W", "over bound", "first s", "median s"):
        table.add_column(title, justify="right")
    for case in build_cases(args.seed):
        planned, seconds = measure(case, args.seed, args.repetitions)
        size = planned.size
        table.add_row(
            case.name,
            str(len(planned.schedule.slots)),
            str(sum(map(len, case.inventory.by_rank.values()))),
            str(size.window),
            f"{size.worst_slot_bytes / size.lower_bound_bytes - 1:.2%}",
            f"{seconds[0]:.3f}",
            f"{statistics.median(seconds[1:] or seconds):.3f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
