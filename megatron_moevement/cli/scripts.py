# SPDX-License-Identifier: Apache-2.0
"""`moevement scripts`: what other programs start and watch jobs with, to be copied."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.table import Table

from megatron_moevement.cli.inputs import read_text
from megatron_moevement.cli.output import add_json_flag, show
from megatron_moevement.errors import ExitCode, UserError

HELP = "show the files for Slurm, ft_launcher, Kubernetes, Prometheus and Grafana"
DESCRIPTION = """
Lists the files for other programs that come with the package. With NAME it prints one, to be
written to a file, and changed there.
"""
SCRIPTS = {
    "train_moe.sbatch": "trains on a Slurm cluster, a task for each GPU",
    "run_ft_launcher.sh": "trains on this machine under ft_launcher of nvidia-resiliency-ext",
    "kubernetes.yaml": "trains on Kubernetes, a pod for each node",
    "moevement-rules.yml": "alert rules for Prometheus, on the metrics of --metrics-address",
    "moevement-dashboard.json": "a dashboard for Grafana, of the same metrics",
}
"""What each is for; `setup.py` puts them into the package."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `moevement scripts`."""
    parser.add_argument(
        "name", metavar="NAME", nargs="?", choices=tuple(SCRIPTS), help=" or ".join(SCRIPTS)
    )
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the list, or the text of one."""
    paths = {name: _path(name) for name in SCRIPTS if args.name in {None, name}}
    if args.name is not None and not args.json:
        sys.stdout.write(read_text(paths[args.name]))
        return ExitCode.DONE
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for name in paths:
        table.add_row(name, SCRIPTS[name])
    document = {
        name: {"about": SCRIPTS[name], "path": str(path), "text": read_text(path)}
        for name, path in paths.items()
    }
    show(args, document, [table])
    return ExitCode.DONE


def _path(name: str) -> Path:
    """Returns where a script lies: inside the installed package, or in the checkout."""
    package = Path(__file__).resolve().parents[1]
    candidates = (package / "scripts" / name, package.parent / "scripts" / name)
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        raise UserError(f"no {name} at {candidates[0]} or {candidates[1]}: reinstall the package")
    return found
