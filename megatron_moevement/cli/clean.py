# SPDX-License-Identifier: Apache-2.0
"""`moevement clean`: removes what runs left in host memory."""

from __future__ import annotations

import argparse

from rich.filesize import decimal

from megatron_moevement.cli.inputs import add_store_dir
from megatron_moevement.cli.output import add_json_flag, show
from megatron_moevement.errors import ExitCode, UserError
from megatron_moevement.runtime.stores.cleaning import clean

HELP = "remove what runs left in host memory"
DESCRIPTION = """
Removes the stores that runs left on this machine after a crash; a relaunch can't go on from them
any more. A run of which a process lives stays as it is, the stores of its dead included: its next
recovery may need them.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `moevement clean`."""
    add_store_dir(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--run-id", metavar="ID", help="of this run")
    which.add_argument("--all", action="store_true", help="of all runs")
    parser.add_argument(
        "--dry-run", action="store_true", help="remove nothing, print what would be removed"
    )
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Removes, and prints what.

    Raises:
        UserError: a run is in use.
    """
    found = clean(args.store_dir, args.run_id, dry_run=args.dry_run)
    document = {
        "dry_run": args.dry_run,
        "removed": {str(folder): freed_bytes for folder, freed_bytes in found.removed.items()},
        "in_use": list(found.in_use),
    }
    removed = "would remove" if args.dry_run else "removed"
    lines = [f"{removed} {folder}: {decimal(freed)}" for folder, freed in found.removed.items()]
    if not lines and not found.in_use:
        which = "" if args.run_id is None else f" of run {args.run_id}"
        lines = [f"nothing{which} in {args.store_dir}"]
    show(args, document, lines)
    if found.in_use:
        more = len(found.in_use) - 1
        raise UserError(found.in_use[0] + (f" (and {more} more runs)" if more else ""))
    return ExitCode.DONE
