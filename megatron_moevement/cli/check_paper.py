# SPDX-License-Identifier: Apache-2.0
"""`moevement check --paper`: the memory of the paper's jobs, beside the figures of the paper."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from megatron_moevement.cli.output import show
from megatron_moevement.errors import ExitCode
from megatron_moevement.policy.preflight.forecast import Cluster, JobForecast, NodeForecast
from megatron_moevement.policy.preflight.published import (
    GLOBAL_BATCH,
    GPUS_PER_NODE,
    NODE_BYTES,
    NODES,
    PUBLISHED,
    SEQUENCE,
    PublishedMemory,
)
from megatron_moevement.training.presets import PRESETS

_GB = 1e9
_FLAGS = (
    f"--seq-length={SEQUENCE}",
    f"--global-batch-size={GLOBAL_BATCH}",
    "--micro-batch-size=4",
    "--fp16",
    "--use-distributed-optimizer",
    "--moevement-strategy=moevement",
    "--moevement-backend=cuda",
    "--mock-data",
    "--tokenizer-type=NullTokenizer",
    "--train-iters=10000",
    "--lr=1e-4",
)
"""ZeRO stage 1, and 32 samples of each micro-batch over 8 ranks."""


def flags_of(job: PublishedMemory) -> list[str]:
    """Returns the flags of a job of the paper, as near as they can be had here.

    Megatron-Core spreads experts evenly, so four of them over four ranks; and layers, but for those
    of the first and the last stage.
    """
    preset = PRESETS[job.preset]
    ends = preset["num_layers"] % job.pp and _layers_of_ends(preset["num_layers"], job.pp)
    uneven = [f"--decoder-{end}-pipeline-num-layers={ends}" for end in ("first", "last") if ends]
    return [
        *_FLAGS,
        *uneven,
        f"--model-preset={job.preset}",
        f"--vocab-size={preset['vocab_size']}",
        f"--pipeline-model-parallel-size={job.pp}",
        f"--expert-model-parallel-size={min(job.ep, preset['num_experts'])}",
        f"--moevement-window={job.window}",
    ]


def _layers_of_ends(layers: int, pp: int) -> int:
    """Returns how many layers the first and the last stage have, so that all others have equally.

    Of what is possible it is what comes nearest to the others.
    """
    each = layers / pp
    possible = [ends for ends in range(1, layers // 2) if (layers - 2 * ends) % (pp - 2) == 0]
    return min(possible, key=lambda ends: abs(ends - each))


def run(
    args: argparse.Namespace, look_ahead: Callable[[Sequence[str], Cluster], JobForecast]
) -> int:
    """Prints a row for each model of the paper.

    Args:
        look_ahead: forecasts the job of some flags.
    """
    rows = [_row(job, look_ahead) for job in PUBLISHED]
    table = Table(box=None, padding=(0, 1, 0, 0), title="whole cluster, GB", title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "model" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(_shown, row.values()))
    line = (
        f"{NODES} nodes of {NODE_BYTES / _GB:g} GB; the paper's figures are those of its section "
        "5.6, without copies; docs/use/check.md explains the differences"
    )
    show(args, rows, [table, line])
    return ExitCode.DONE


def _row(
    job: PublishedMemory, look_ahead: Callable[[Sequence[str], Cluster], JobForecast]
) -> dict[str, Any]:
    forecast = look_ahead(flags_of(job), Cluster(NODES, GPUS_PER_NODE))
    account = NodeForecast.of(forecast.processes).account
    return {
        "model": job.preset,
        "W": job.window,
        "X": account.own_slots_bytes / _GB,
        "Y": account.logs_bytes / _GB,
        "copies": account.held_slots_bytes / _GB,
        "host": account.total_bytes / _GB,
        "worst node": max(map(forecast.host_bytes, forecast.nodes)) / NODE_BYTES,
        "paper X": job.slots_gb,
        "paper Y": job.log_gb,
        "Gemini": job.gemini_gb,
    }


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0%}" if value < 1 else f"{value:.{1 if value < 100 else 0}f}"
    return str(value)
