# SPDX-License-Identifier: Apache-2.0
"""Builds, installs and maintains the fork; `docs/understand/fork.md` shows each command."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron_moevement.errors import ExitCode, UserError
from megatron_moevement.integrations.megatron.fork.checkout import export_series, open_checkout
from megatron_moevement.integrations.megatron.fork.marker import check_fork
from megatron_moevement.integrations.megatron.fork.series import load_series, series_directory
from megatron_moevement.integrations.megatron.fork.wheel import build_fork, fetch_release


def build_parser() -> argparse.ArgumentParser:
    """Returns the command's parser."""
    parser = argparse.ArgumentParser(prog="fork", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    cache = argparse.ArgumentParser(add_help=False)
    cache.add_argument("--cache", type=Path, help="directory that keeps the downloaded release")
    build = commands.add_parser("build", parents=[cache], help="write the fork's wheel")
    build.add_argument("--out", type=Path, required=True, help="directory for the wheel")
    build.set_defaults(run=_build)
    install = commands.add_parser("install", parents=[cache], help="build the fork and install it")
    install.set_defaults(run=_install)
    check = commands.add_parser("check", help="print whether this interpreter finds the fork")
    check.set_defaults(run=_check)
    edit = commands.add_parser("edit", parents=[cache], help="open a git checkout of the fork")
    edit.add_argument("directory", type=Path)
    edit.set_defaults(run=_edit)
    export = commands.add_parser("export", help="write a checkout's commits as the series")
    export.add_argument("directory", type=Path)
    export.set_defaults(run=_export)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    args = build_parser().parse_args(argv)
    try:
        args.run(args)
    except UserError as error:
        print(f"fork {args.command}: {error}", file=sys.stderr)
        return ExitCode.BAD_ARGUMENTS
    return ExitCode.DONE


def _build(args: argparse.Namespace) -> None:
    print(_build_wheel(args.cache or args.out / "release", args.out))


def _install(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        wheel = _build_wheel(args.cache or Path(scratch) / "release", Path(scratch))
        command = [sys.executable, "-m", "pip", "install", "--quiet"]
        command += ["--no-deps", "--force-reinstall", str(wheel)]
        if subprocess.run(command, check=False).returncode != 0:
            raise UserError(f"pip could not install {wheel.name} for {sys.executable}")
        print(f"installed {wheel.name} for {sys.executable}")


def _check(_: argparse.Namespace) -> None:
    marker = check_fork()
    print(f"fork version {marker.fork_version}, {len(marker.patches) + 1} patches")


def _edit(args: argparse.Namespace) -> None:
    series = load_series()
    with tempfile.TemporaryDirectory() as scratch:
        release = fetch_release(series.upstream, args.cache or Path(scratch))
        open_checkout(series, release, args.directory)
    print(f"{args.directory}: edit, commit, then `fork export {args.directory}`")


def _export(args: argparse.Namespace) -> None:
    for patch in export_series(args.directory, series_directory()).patches:
        print(patch.path)


def _build_wheel(cache: Path, out: Path) -> Path:
    series = load_series()
    return build_fork(series, fetch_release(series.upstream, cache), out)


if __name__ == "__main__":
    sys.exit(main())
