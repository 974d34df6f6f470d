# SPDX-License-Identifier: Apache-2.0
"""What a replay computes of weight gradients, for experts ordered by index and by popularity.

    .venv/bin/python benchmarks/popularity.py

The router is skewed as in the paper's appendix: the tokens of each layer's experts are drawn from a
symmetric Dirichlet distribution with the skewness S. One process trains a step, orders experts by
what its routers did, and runs the W - 1 steps of a conversion with what is frozen in each. FLOPs of
matrix products are counted in these runs, for experts one by one and grouped on the host. For a
grouped GEMM that skips a layer's weight gradients only as a whole, as on a GPU, they are calculated
from the same counts, on some expert-parallel ranks; `by tokens alone` is the paper's order, which
suits the first two.

Flags of pretrain_moe.py are added to the defaults and win over them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_moevement.backends.backend import choose, load

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where tests.harness is
backend = load(choose(None))
backend.install()  # before Megatron is imported

from megatron_moevement.integrations.megatron.freezing import Freezing  # noqa: E402
from megatron_moevement.integrations.megatron.process_groups import leave_job  # noqa: E402
from megatron_moevement.integrations.megatron.snapshots import LiveOperators  # noqa: E402
from megatron_moevement.policy.job.operators import Inventory, OperatorId  # noqa: E402
from megatron_moevement.policy.job.ranks import LogicalRank  # noqa: E402
from megatron_moevement.policy.window.ordering import Ordering, order_operators  # noqa: E402
from megatron_moevement.policy.window.popularity import Popularity  # noqa: E402
from megatron_moevement.policy.window.schedule import WindowSchedule  # noqa: E402
from megatron_moevement.policy.window.skipping_schedule import ExpertOrder, schedule_of  # noqa: E402
from megatron_moevement.policy.window.weight_gradients import (  # noqa: E402
    ExpertKernels,
    skipped_gradients,
)
from megatron_moevement.policy.window.window_planner import plan_window  # noqa: E402
from megatron_moevement.runtime.coordination.commit_barrier import StopRequest  # noqa: E402
from megatron_moevement.runtime.coordination.progress import START  # noqa: E402
from megatron_moevement.settings.launch import Launch  # noqa: E402
from megatron_moevement.training.arguments import parse  # noqa: E402
from megatron_moevement.training.job import Job, build_job  # noqa: E402
from megatron_moevement.training.steps import build_datasets, open_steps  # noqa: E402
from tests.harness.gemm_flops import gemm_flops  # noqa: E402

FLAGS = (
    "--model-preset=tiny",
    "--num-layers=6",
    "--hidden-size=64",
    "--num-attention-heads=4",
    "--num-experts=16",
    "--moe-router-topk=2",
    "--moe-ffn-hidden-size=128",
    "--vocab-size=512",
    "--seq-length=256",
    "--mock-data",
    "--tokenizer-type=NullTokenizer",
    "--micro-batch-size=2",
    "--global-batch-size=2",
    "--train-iters=4",
    "--lr=1e-4",
    "--eval-iters=0",
    "--num-workers=0",
    "--untie-embeddings-and-output-weights",
    "--moevement-strategy=moevement",
    "--moevement-window=4",
    "--moevement-order=hard",
)
SKEWNESS = (0.25, 0.50, 0.75)


@dataclasses.dataclass(frozen=True)
class Row:
    """What a replay of one window takes.

    Attributes:
        skewness: S, that the tokens were drawn with.
        flops: of weight gradients of experts, in all steps with frozen operators.
        skipped: what part of them in ordinary steps is left out.
        predicted: the same, from schedule and counts.
        counted: whether they were counted in a run.
    """

    skewness: float
    experts: str
    order: str
    flops: int
    skipped: float
    predicted: float
    counted: bool


def log_shares(alpha: float, experts: int, draw: random.Random) -> list[float]:
    """Returns the logarithms of a draw from a symmetric Dirichlet distribution, up to a constant.

    With a small alpha most shares are no floats any more; their logarithms are.
    """
    return [
        math.log(draw.gammavariate(alpha + 1, 1.0)) + math.log(1.0 - draw.random()) / alpha
        for _ in range(experts)
    ]


def skew(job: Job, skewness: float, seed: int) -> None:
    """Lets routers choose by drawn shares: a token takes its experts as from an urn.

    The choice of each place in a batch stays, so that every run of it has the same tokens.
    """
    draw = random.Random(seed)
    noise = torch.Generator().manual_seed(seed)
    for chunk in job.chunks:
        for router in chunk.modules():
            if type(router).__name__ == "TopKRouter":
                experts = job.arguments.moe.num_experts or 0
                alpha = (1 / skewness - 1) / experts  # as S = 1 / (alpha E + 1)
                shares = torch.tensor(log_shares(alpha, experts, draw)).clamp(min=-1e6)
                _choose_by(router, shares - shares.max(), noise)


def _choose_by(router: Any, shares: torch.Tensor, noise: torch.Generator) -> None:
    gating, drawn = router.gating, {}

    def skewed(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = gating(hidden)
        if logits.shape not in drawn:
            uniform = torch.rand(logits.shape, generator=noise)
            drawn[logits.shape] = shares - torch.log(-torch.log(uniform.clamp(min=1e-30)))
        return logits * 1e-3 + drawn[logits.shape]

    router.gating = skewed


class Conversion:
    """The replayed steps of a window with frozen operators, on one rank that has all of a model."""

    def __init__(self, job: Job, batches: Sequence[Any]) -> None:
        self._job, self._batches = job, list(batches)
        self._freezing = Freezing(job.chunks, job.optimizer)
        self._counted: dict[frozenset[OperatorId], int] = {}
        live = LiveOperators(job.chunks, job.optimizer)
        self.inventory = Inventory({LogicalRank(): tuple(live.operators)})

    def flops(self, active: frozenset[OperatorId]) -> int:
        """Returns the FLOPs of all matrix products of a step in which these are trained."""
        if active not in self._counted:
            self._freezing.set_active(active)
            with gemm_flops() as counter:
                self._job.schedule.forward_backward(self._batches)
            self._job.transients.reset()
            self._counted[active] = int(counter.get_total_flops())
        return self._counted[active]

    def skipped_flops(self, schedule: WindowSchedule) -> int:
        """Returns what all steps of a conversion leave out."""
        whole = self.flops(self.inventory.operators)
        active: frozenset[OperatorId] = frozenset()
        skipped = 0
        for full in schedule.full[:-1]:
            active |= full
            skipped += whole - self.flops(active)
        return skipped


@contextlib.contextmanager
def conversion(
    flags: Sequence[str], skewness: float, seed: int
) -> Iterator[tuple[Conversion, Mapping[OperatorId, int]]]:
    """Yields the conversion of a trained job, and how many tokens each expert had in a step."""
    job = build_job(parse(flags, 1), Launch(rank=0, local_rank=0, world_size=1), backend)
    try:
        skew(job, skewness, seed)
        with open_steps(job, build_datasets(job), START) as step:
            step.run(StopRequest.NONE)
            found = Conversion(job, list(step.micro_batches()))
            counts = job.router_counts.reduced(range(1, 2))
            known = Popularity(job.router_counts.ordering).after_window(counts, 0.0)
            yield found, known.of_experts(found.inventory.operators)
    finally:
        leave_job()


def rows_of(
    flags: Sequence[str], window: int, skewness: float, seed: int, ranks: int = 4
) -> Iterator[Row]:
    """Yields what a replay of a window takes, by kernels and order."""
    for experts, grouped in (("sequential", ()), ("grouped, host", ("--moe-grouped-gemm",))):
        with conversion((*flags, *grouped), skewness, seed) as (found, tokens):
            inventory = found.inventory
            by_index = schedule_of(inventory, window)
            chosen = schedule_of(inventory, window, ExpertOrder(ExpertKernels.EACH, tokens, tokens))
            others = _skipped_of_others(found, by_index, tokens)
            for order, schedule in (("index", by_index), ("chosen", chosen)):
                work = skipped_gradients(schedule, ExpertKernels.EACH, tokens)
                whole = _flops(found, tokens) * len(work.by_step)
                skipped = found.skipped_flops(schedule) - others
                yield Row(
                    *(skewness, experts, order, whole - skipped, skipped / whole),
                    predicted=work.share,
                    counted=True,
                )
    inventory = expert_parallel(inventory, ranks)
    by_index = schedule_of(inventory, window)
    whole_order = ExpertOrder(ExpertKernels.WHOLE, tokens, tokens)
    popular_last = order_operators(inventory.operators, Ordering.HARD, tokens)
    for order, schedule in (
        ("index", by_index),
        ("by tokens alone", plan_window(inventory, popular_last, window=window).schedule),
        ("chosen", schedule_of(inventory, window, whole_order)),
    ):
        share = skipped_gradients(schedule, ExpertKernels.WHOLE, tokens).share
        flops = round(whole * (1 - share))
        yield Row(skewness, f"grouped, GPU, EP {ranks}", order, flops, share, share, counted=False)


def expert_parallel(inventory: Inventory, ranks: int) -> Inventory:
    """Returns the same operators on expert-parallel ranks, which share the experts of each layer.

    Each rank captures what is no expert whole.
    """
    (listed,) = inventory.by_rank.values()
    experts = 1 + max(one.id.expert or 0 for one in listed)
    return Inventory(
        {
            LogicalRank(ep=rank): tuple(
                one
                for one in listed
                if one.id.expert is None or one.id.expert * ranks // experts == rank
            )
            for rank in range(ranks)
        }
    )


def _flops(found: Conversion, tokens: Mapping[OperatorId, int]) -> int:
    """Returns what weight gradients of experts take in a step: all of them are frozen or none."""
    operators = found.inventory.operators
    return found.flops(operators) - found.flops(operators.difference(tokens))


def _skipped_of_others(
    found: Conversion, schedule: WindowSchedule, tokens: Mapping[OperatorId, int]
) -> int:
    """Returns what a conversion leaves out of operators that are no experts: in every order."""
    operators, skipped = found.inventory.operators, 0
    whole, active = found.flops(operators), frozenset(tokens)
    for full in schedule.full[:-1]:
        active |= full
        skipped += whole - found.flops(active)
    return skipped


def table(rows: Sequence[Row]) -> str:
    lines = ["| S | experts | order | expert weight gradients (MFLOP) | skipped | of index | |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in rows:
        if row.order == "index":
            base = row.flops
        how = "counted" if row.counted else "calculated"
        lines.append(
            f"| {row.skewness} | {row.experts} | {row.order} | {row.flops / 1e6:.1f} "
            f"| {row.skipped:.1%} | {row.flops / base:.3f} | {how} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--window", type=int, default=4, help="W")
    parser.add_argument("--seed", type=int, default=1, help="of the shares that are drawn")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    options, flags = parser.parse_known_args()
    torch.set_num_threads(1)
    rows = [
        row
        for skewness in SKEWNESS
        for row in rows_of((*FLAGS, *flags), options.window, skewness, options.seed)
    ]
    shown = json.dumps([dataclasses.asdict(row) for row in rows]) + "\n"
    sys.stdout.write(shown if options.json else table(rows))


if __name__ == "__main__":
    main()
