# SPDX-License-Identifier: Apache-2.0
"""How long a replayed iteration takes by the share of the model that is frozen in it.

    .venv/bin/python benchmarks/frozen_step.py --picture docs/evidence/frozen.svg

An iteration is forward, backward and step together. One process computes what a later pipeline
stage computes: the gradient of its input is wanted, whatever is frozen. Variants alternate, and a
ratio is the median of the ratios of the rounds. On the host times are of the process's CPU, which
with one thread is the wall time of a machine that does nothing else. `possible` is the ratio if
time went by matrix products alone, `realised` the share of that saving that is measured.

Flags of pretrain_moe.py are added to the defaults and win over them.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from megatron_moevement.backends.backend import BackendName, choose, load

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where tests.harness is
backend = load(choose(None))
backend.install()  # before Megatron is imported

from megatron_moevement.integrations.megatron.freezing import Freezing  # noqa: E402
from megatron_moevement.integrations.megatron.pipeline_schedule import MicroBatch  # noqa: E402
from megatron_moevement.integrations.megatron.process_groups import leave_job  # noqa: E402
from megatron_moevement.policy.job.operators import OperatorId  # noqa: E402
from megatron_moevement.runtime.coordination.progress import START  # noqa: E402
from megatron_moevement.settings.launch import Launch  # noqa: E402
from megatron_moevement.training.arguments import parse  # noqa: E402
from megatron_moevement.training.job import Job, build_job  # noqa: E402
from megatron_moevement.training.steps import build_datasets, open_steps  # noqa: E402
from tests.harness.gemm_flops import gemm_flops  # noqa: E402

GEMM_BOUND = (
    "--model-preset=tiny",
    "--num-layers=2",
    "--hidden-size=1024",
    "--num-attention-heads=8",
    "--num-experts=4",
    "--moe-ffn-hidden-size=1024",
    "--vocab-size=4096",
    "--seq-length=256",
    "--mock-data",
    "--tokenizer-type=NullTokenizer",
    "--micro-batch-size=4",
    "--global-batch-size=4",
    "--train-iters=1000",
    "--lr=1e-4",
    "--eval-iters=0",
    "--num-workers=0",
)
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclasses.dataclass
class Variant:
    """An iteration with the first operators of a window's order trained and the rest frozen."""

    active: frozenset[OperatorId]
    durations_s: list[float] = dataclasses.field(default_factory=list)
    flops: int = 0

    @property
    def typical_s(self) -> float:
        return statistics.median(self.durations_s)

    def ratio_to(self, other: Variant) -> float:
        """Returns the ratio of the times, round by round: a machine that slows down slows both."""
        rounds = zip(self.durations_s, other.durations_s, strict=True)
        return statistics.median(one / base for one, base in rounds)


class Replay:
    """Repeats one iteration, as it is replayed."""

    def __init__(self, job: Job, batches: Iterable[MicroBatch]) -> None:
        self.freezing = Freezing(job.chunks, job.optimizer)
        self._job = job
        self._batches = list(batches)
        job.schedule.forward_backward(self._batches)
        self._statistics = job.optimizer.prepare()
        for module in job.chunks[0].modules():
            if module.__class__.__name__ == "LanguageModelEmbedding":
                module.register_forward_hook(_received_from_another_stage)

    def run(self) -> None:
        self._job.schedule.forward_backward(self._batches)
        self._job.optimizer.commit(self._job.optimizer.prepare(self._statistics))
        self._job.optimizer.gather()


def _received_from_another_stage(_: object, __: object, output: torch.Tensor) -> torch.Tensor:
    return output if output.requires_grad else output.requires_grad_()


def variants(replay: Replay) -> list[Variant]:
    """Returns variants that freeze about the wanted shares of the weight-gradient products."""
    order = sorted(replay.freezing.operators)
    flops = {}
    for frozen in range(len(order) + 1):
        replay.freezing.set_active(frozenset(order[: len(order) - frozen]))
        with gemm_flops() as counter:
            replay.run()
        flops[frozen] = counter.get_total_flops()
    most = flops[0] - flops[len(order)]
    chosen = {
        min(flops, key=lambda frozen: abs((flops[0] - flops[frozen]) / most - share))
        for share in SHARES
    } | {len(order)}
    return [
        Variant(frozenset(order[: len(order) - frozen]), flops=flops[frozen])
        for frozen in sorted(chosen)
    ]


def measure(replay: Replay, chosen: list[Variant], rounds: int) -> None:
    for number in range(rounds + 1):
        for variant in chosen:
            replay.freezing.set_active(variant.active)
            backend.synchronize()
            started_s = clock_s()
            replay.run()
            backend.synchronize()
            if number:  # the first round warms up
                variant.durations_s.append(clock_s() - started_s)


def clock_s() -> float:
    return time.process_time() if backend.name is BackendName.CPU else time.perf_counter()


def table(chosen: list[Variant], operators: int) -> str:
    lines = ["| frozen operators | frozen share | iteration (ms) | ratio | possible | realised |"]
    lines.append("|---|---|---|---|---|---|")
    ordinary, all_frozen = chosen[0], chosen[-1]
    for variant in chosen:
        skipped = ordinary.flops - variant.flops
        share = skipped / (ordinary.flops - all_frozen.flops)
        possible = skipped / ordinary.flops
        ratio = variant.ratio_to(ordinary)
        realised = f"{(1 - ratio) / possible:.2f}" if skipped else ""
        lines.append(
            f"| {operators - len(variant.active)} of {operators} | {share:.2f} "
            f"| {variant.typical_s * 1e3:.0f} | {ratio:.3f} | {1 - possible:.3f} | {realised} |"
        )
    return "\n".join(lines) + "\n"


def draw(chosen: list[Variant], path: Path, title: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    ordinary, all_frozen = chosen[0], chosen[-1]
    shares = [(ordinary.flops - one.flops) / (ordinary.flops - all_frozen.flops) for one in chosen]
    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ratios = [one.ratio_to(ordinary) for one in chosen]
    axes.plot(shares, [one.flops / ordinary.flops for one in chosen], "--", label="matrix products")
    axes.plot(shares, ratios, marker="o", label="measured")
    axes.axhline(0.72, color="gray", linewidth=0.8, label="target, all frozen")
    axes.set(
        xlabel="share of the weight-gradient products that is frozen",
        ylabel="iteration / ordinary iteration",
        ylim=(0.5, 1.05),
        title=title,
    )
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=9, help="timed iterations of each variant")
    parser.add_argument("--picture", type=Path, help="where the curve is drawn")
    options, flags = parser.parse_known_args()
    torch.set_num_threads(1)
    arguments = parse((*GEMM_BOUND, *flags), 1)
    job = build_job(arguments, Launch(rank=0, local_rank=0, world_size=1), backend)
    try:
        with open_steps(job, build_datasets(job), START) as step:
            replay = Replay(job, step.micro_batches())
            chosen = variants(replay)
            measure(replay, chosen, options.rounds)
    finally:
        leave_job()
    sys.stdout.write(table(chosen, len(replay.freezing.operators)))
    if options.picture is not None:
        experts = "grouped" if arguments.moe.moe_grouped_gemm else "sequential"
        draw(chosen, options.picture, f"{backend.name.value}, {experts} experts")


if __name__ == "__main__":
    main()
