# SPDX-License-Identifier: Apache-2.0
"""The lines that Megatron-LM prints on the last rank, from plain numbers.

Source: `training_log` and `evaluate_and_print_results` of megatron/training/training.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from datetime import datetime, timedelta

from megatron_moevement.training.reporting.interval import NO_TOTALS, Totals

MAX_PERPLEXITY_LOSS = 20.0
"""Perplexities are computed of at most this loss, as upstream does: e**20 says enough."""


@dataclasses.dataclass(frozen=True)
class IterationReport:
    """What one iteration line says.

    Attributes:
        consumed_samples: samples read up to and with this iteration.
        elapsed_per_iteration: mean over the iterations since the last line.
        tflops_per_gpu: throughput in 1e12 FLOP/s; None: not asked for.
        learning_rate: of the newest iteration; None: this rank trains no parameter.
        losses: name to mean over the iterations since the last line that were not skipped.
        grad_norm: of the newest iteration; None: its gradients overflowed.
        skipped_iterations: since the last line, for overflow.
        nan_iterations: those of them whose loss was no finite number.
    """

    iteration: int
    train_iters: int
    consumed_samples: int
    elapsed_per_iteration: timedelta
    tflops_per_gpu: float | None
    learning_rate: float | None
    global_batch_size: int
    losses: Mapping[str, float]
    loss_scale: float
    grad_norm: float | None
    skipped_iterations: int
    nan_iterations: int
    totals: Totals = NO_TOTALS


def iteration_line(report: IterationReport, now: datetime) -> str:
    """Returns the line of a training interval."""
    fields = [
        f"iteration {report.iteration:8d}/{report.train_iters:8d}",
        f"consumed samples: {report.consumed_samples:12d}",
        "elapsed time per iteration (ms): "
        f"{report.elapsed_per_iteration / timedelta(milliseconds=1):.1f}",
    ]
    if report.tflops_per_gpu is not None:
        fields.append(f"throughput per GPU (TFLOP/s/GPU): {report.tflops_per_gpu:.1f}")
    if report.learning_rate is not None:
        fields.append(f"learning rate: {report.learning_rate:.6E}")
    fields.append(f"global batch size: {report.global_batch_size:5d}")
    # Upstream leaves out a mean that is not positive: nothing was counted, or it is no number.
    fields += [f"{name}: {mean:.6E}" for name, mean in report.losses.items() if mean > 0.0]
    fields.append(f"loss scale: {report.loss_scale:.1f}")
    if report.grad_norm is not None:
        fields.append(f"grad norm: {report.grad_norm:.3f}")
    if report.totals.num_zeros is not None:
        fields.append(f"num zeros: {float(report.totals.num_zeros)}")  # as upstream has it
    if report.totals.params_norm is not None:
        fields.append(f"params norm: {report.totals.params_norm:.3f}")
    fields.append(f"number of skipped iterations: {report.skipped_iterations:3d}")
    fields.append(f"number of nan iterations: {report.nan_iterations:3d}")
    return f" [{now:%Y-%m-%d %H:%M:%S.%f}] " + " | ".join(fields) + " |"


def perplexity(loss: float) -> float:
    """Returns the perplexity of a loss in nats per token."""
    return math.exp(min(MAX_PERPLEXITY_LOSS, loss))


def evaluation_lines(iteration: int, losses: Mapping[str, float], split: str | None) -> str:
    """Returns the ruled line of an evaluation, three lines in all.

    Args:
        split: which split was evaluated after the training; None: evaluated on the way.
    """
    place = f"iteration {iteration}" + (f" on {split} set" if split is not None else "")
    text = f" validation loss at {place} | "
    for name, loss in losses.items():
        text += f"{name} value: {loss:.6E} | {name} PPL: {perplexity(loss):.6E} | "
    rule = "-" * (len(text) + 1)
    return f"{rule}\n{text}\n{rule}"
