"""`moevement presets`: the model presets and their numbers of parameters."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from megatron_moevement.training.presets import PRESETS, preset_model

HELP = "show the model presets and their sizes"
DESCRIPTION = None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds no flags."""
    parser.allow_abbrev = True


def run(args: argparse.Namespace) -> int:
    """Prints a table of all presets."""
    del args
    from megatron_moevement.backends import cpu  # noqa: PLC0415  (imports torch)

    cpu.install()
    from megatron_moevement.integrations.megatron.parameter_count import (  # noqa: PLC0415
        count_parameters,
    )

    table = Table("preset", "layers", "hidden", "experts", "top-k", "parameters", "active")
    for name, flags in PRESETS.items():
        architecture, moe = preset_model(name)
        vocab_size = int(flags.get("vocab_size", 320))
        count = count_parameters(
            architecture, moe, vocab_size=vocab_size, seq_length=int(flags["seq_length"])
        )
        table.add_row(
            name,
            str(architecture.num_layers),
            str(architecture.hidden_size),
            str(moe.num_experts),
            str(moe.moe_router_topk),
            f"{count.total / 1e9:.4g} B",
            f"{count.active / 1e9:.4g} B",
        )
    Console().print(table)
    return 0
