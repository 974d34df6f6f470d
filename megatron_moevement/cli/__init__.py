# SPDX-License-Identifier: Apache-2.0
"""The `moevement` command."""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings
from collections.abc import Sequence
from typing import Protocol, cast

from megatron_moevement.errors import ExitCode, UserError
from megatron_moevement.settings.completion import add_completion
from megatron_moevement.settings.parser import Parser, add_version

COMMANDS: tuple[str, ...] = (
    "account",
    "check",
    "clean",
    "convert",
    "data",
    "ended",
    "events",
    "explain",
    "inspect",
    "launch",
    "losses",
    "operators",
    "presets",
    "recoveries",
    "report",
    "schedule",
    "scripts",
    "status",
    "stores",
    "watch",
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


def build_parser(names: Sequence[str] = COMMANDS) -> Parser:
    """Returns the parser of the whole command, or of some sub-commands of it."""
    parser = Parser(prog="moevement", description=__doc__)
    add_version(parser)
    add_completion(parser)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in names:
        module = cast(CommandModule, importlib.import_module(f"{__name__}.{name}"))
        own = subparsers.add_parser(name, help=module.HELP, description=module.DESCRIPTION)
        own.set_defaults(run=module.run, parser=own)
        module.add_flags(own)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one sub-command and returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    # What the other sub-commands import would be waited for in vain.
    chosen = [name for name in COMMANDS if name in argv[:1]]
    args = build_parser(chosen or COMMANDS).parse_args(argv)
    # Which package brings NVIDIA's management library is torch's concern.
    warnings.filterwarnings("ignore", message="The pynvml package", category=FutureWarning)
    try:
        return int(args.run(args))
    except UserError as error:
        for message in error.messages:
            print(f"moevement {args.command}: {message}", file=sys.stderr)
        return ExitCode.BAD_ARGUMENTS
