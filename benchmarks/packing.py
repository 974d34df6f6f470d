# SPDX-License-Identifier: Apache-2.0
"""How far packings are from the optimum: small random cases against brute force.

Run `python benchmarks/packing.py`. Each row is a kind of inventory of up to seven operators and
three slots; the ratio is the worst slot of the plan over that of the best of all assignments.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics

from rich.console import Console
from rich.table import Table

from megatron_moevement.policy.job.operators import Inventory, Operator, OperatorId, OperatorKind
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import slot_bytes
from megatron_moevement.policy.window.window_planner import plan_window

KINDS = {
    "1 rank, COMPUTE 1/6 of FULL": (1, 6),
    "2 ranks, unequal shards, 1/6": (2, 6),
    "3 ranks, unequal shards, 1/6": (3, 6),
    "1 rank, any COMPUTE": (1, None),
    "3 ranks, unequal shards, any COMPUTE": (3, None),
}


def random_inventory(
    generator: random.Random, num_ranks: int, compute_part: int | None
) -> Inventory:
    count = generator.randint(1, 7)
    by_rank = {}
    for rank in range(num_ranks):
        operators = []
        for number in range(count):
            size = generator.randint(1, generator.choice([10, 100]))
            compute = size if compute_part else generator.randint(0, 6 * size)
            full = size * (compute_part or 6)
            operator = OperatorId(OperatorKind.EXPERT, 0, number)
            operators.append(Operator(operator, full, compute))
        by_rank[LogicalRank(dp=rank)] = tuple(operators)
    return Inventory(by_rank)


def smallest_worst_slot(inventory: Inventory, window: int) -> int:
    count = len(inventory.sorted_operators)
    return min(
        max(
            max(
                slot_bytes(
                    (
                        (slot, operator.full_bytes, operator.compute_bytes)
                        for slot, operator in zip(slots, operators, strict=True)
                    ),
                    window,
                )
            )
            for operators in inventory.by_rank.values()
        )
        for slots in itertools.product(range(window), repeat=count)
    )


def ratio(generator: random.Random, num_ranks: int, compute_part: int | None) -> float:
    inventory = random_inventory(generator, num_ranks, compute_part)
    window = generator.randint(2, 3)
    planned = plan_window(inventory, inventory.sorted_operators, window=window)
    return planned.size.worst_slot_bytes / smallest_worst_slot(inventory, window)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=300)
    args = parser.parse_args()
    table = Table(title="worst slot over the optimum", box=None)
    for title in ("inventory", "mean", "99 %", "worst"):
        table.add_column(title, justify="right")
    for name, kind in KINDS.items():
        generator = random.Random(args.seed)
        ratios = [ratio(generator, *kind) for _ in range(args.cases)]
        high = statistics.quantiles(ratios, n=100)[-1]
        table.add_row(name, f"{statistics.mean(ratios):.3f}", f"{high:.3f}", f"{max(ratios):.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
