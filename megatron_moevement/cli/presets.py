"""`moevement presets`: the model presets and their numbers of parameters."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from megatron_moevement.errors import ExitCode
from megatron_moevement.training.presets import PARAMETERS, PRESETS, preset_model

HELP = "show the model presets and their sizes"
DESCRIPTION = None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds no flags."""
    parser.allow_abbrev = True


def run(args: argparse.Namespace) -> int:
    """Prints a table of all presets."""
    del args
    table = Table("preset", "layers", "hidden", "experts", "top-k", "parameters", "active")
    for name in PRESETS:
        architecture, moe = preset_model(name)
        count = PARAMETERS[name]
        table.add_row(
            name,
            str(architecture.num_layers),
            str(architecture.hidden_size),
            str(moe.num_experts),
            str(moe.moe_router_topk),
            _short(count.total),
            _short(count.active),
        )
    Console().print(table)
    return ExitCode.DONE


def _short(parameters: int) -> str:
    size, unit = (1e9, "B") if parameters >= 1e8 else (1e6, "M")
    return f"{parameters / size:.3g} {unit}"
