# SPDX-License-Identifier: Apache-2.0
"""`moevement presets`: the model presets and their numbers of parameters."""

from __future__ import annotations

import argparse
import dataclasses

from rich.table import Table

from megatron_moevement.cli.output import add_json_flag, show
from megatron_moevement.errors import ExitCode
from megatron_moevement.training.presets import PARAMETERS, PRESETS, preset_model

HELP = "show the model presets and their sizes"
DESCRIPTION = None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `moevement presets`."""
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Prints a table of all presets."""
    document = {}
    table = Table("preset", "layers", "hidden", "experts", "top-k", "parameters", "active")
    for name in PRESETS:
        architecture, moe = preset_model(name)
        count = PARAMETERS[name]
        document[name] = {
            "num_layers": architecture.num_layers,
            "hidden_size": architecture.hidden_size,
            "num_experts": moe.num_experts,
            "moe_router_topk": moe.moe_router_topk,
            "parameters": dataclasses.asdict(count),
        }
        table.add_row(
            name,
            str(architecture.num_layers),
            str(architecture.hidden_size),
            str(moe.num_experts),
            str(moe.moe_router_topk),
            _short(count.total),
            _short(count.active),
        )
    show(args, document, [table])
    return ExitCode.DONE


def _short(parameters: int) -> str:
    size, unit = (1e9, "B") if parameters >= 1e8 else (1e6, "M")
    return f"{parameters / size:.3g} {unit}"
