"""The `moevement` command."""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings
from collections.abc import Sequence
from typing import Protocol, cast

from megatron_moevement.errors import ExitCode, UserError

COMMANDS: tuple[str, ...] = (
    "clean",
    "convert",
    "data",
    "explain",
    "inspect",
    "losses",
    "operators",
    "presets",
    "recoveries",
    "schedule",
    "status",
    "stores",
)
"""Modules of this package that are each one sub-command."""


class CommandModule(Protocol):
    """A module that is one sub-command."""

    HELP: str
    DESCRIPTION: str | None

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Adds its flags to its parser."""

    def run(self, args: argparse.Namespace) -> int:
        """Runs it and returns its exit code; `args.parser` is its parser."""


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command."""
    parser = argparse.ArgumentParser(prog="moevement", description=__doc__, allow_abbrev=False)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = cast(CommandModule, importlib.import_module(f"{__name__}.{name}"))
        own = subparsers.add_parser(
            name, help=module.HELP, description=module.DESCRIPTION, allow_abbrev=False
        )
        own.set_defaults(run=module.run, parser=own)
        module.add_flags(own)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one sub-command and returns its exit code."""
    args = build_parser().parse_args(argv)
    # Which package brings NVIDIA's management library is torch's concern.
    warnings.filterwarnings("ignore", message="The pynvml package", category=FutureWarning)
    try:
        return int(args.run(args))
    except UserError as error:
        print(f"moevement {args.command}: {error}", file=sys.stderr)
        return ExitCode.BAD_ARGUMENTS
