# SPDX-License-Identifier: Apache-2.0
"""A git checkout of the release with the series on top: where patches are written and exported."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.fork.marker import (
    is_marker_patch,
    marker_patch,
    series_marker,
)
from megatron_moevement.integrations.megatron.fork.series import Series, load_series
from megatron_moevement.integrations.megatron.fork.tree import run_git
from megatron_moevement.integrations.megatron.fork.wheel import unpack

UPSTREAM_TAG = "upstream"
COMMITTER = ["-c", "user.name=MoEvement", "-c", "user.email=moevement@localhost"]


def open_checkout(series: Series, release: Path, directory: Path) -> None:
    """Makes a git repository of the release with one commit per patch.

    Raises:
        UserError: The directory exists, or git refuses.
    """
    if directory.exists():
        raise UserError(f"{directory} exists: name another directory, or remove it")
    unpack(release, directory)
    _git(directory, "init", "--quiet")
    (directory / ".git" / "info" / "exclude").write_text("*.dist-info/\n__pycache__/\n")
    _git(directory, "add", "--all")
    message = f"{series.upstream.distribution} {series.upstream.version}"
    _git(directory, *COMMITTER, "commit", "--quiet", "--message", message)
    _git(directory, "tag", UPSTREAM_TAG)
    for patch in series.patches:
        _git(directory, *COMMITTER, "am", "--quiet", "--keep-cr", str(patch.path.resolve()))


def export_series(directory: Path, target: Path) -> Series:
    """Writes the commits of a checkout as the series, the marker patch made anew.

    Nothing is written unless every patch is well-formed.

    Args:
        directory: A checkout made by `open_checkout`.
        target: The series' directory, which holds `UPSTREAM`.

    Raises:
        UserError: Uncommitted changes, a first commit that does not add the marker, or a commit
            message without the header that a patch must carry.
    """
    if _git(directory, "status", "--porcelain"):
        raise UserError(f"{directory} has uncommitted changes: commit or discard them")
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        scratch = Path(name)
        form = ["--zero-commit", "--no-signature", "--no-stat", "--full-index", "--no-numbered"]
        commits = f"{UPSTREAM_TAG}..HEAD"
        _git(directory, "format-patch", "--quiet", *form, "-o", str(scratch.resolve()), commits)
        names = sorted(path.name for path in scratch.iterdir())
        (scratch / "series").write_text("".join(f"{name}\n" for name in names))
        (scratch / "UPSTREAM").write_bytes((target / "UPSTREAM").read_bytes())
        series = load_series(scratch)
        if not series.patches or not is_marker_patch(series.patches[0]):
            raise UserError(f"the first commit above {UPSTREAM_TAG} must add the marker alone")
        first = series.patches[0]
        first.path.write_text(marker_patch(first.header, series_marker(series)))
        load_series(scratch)
        for stale in {path.name for path in target.glob("*.patch")} - set(names):
            (target / stale).unlink()
        for written in (*names, "series"):
            os.replace(scratch / written, target / written)
    return load_series(target)


def _git(directory: Path, *arguments: str) -> str:
    result = run_git(["git", *arguments], directory)
    if result.returncode != 0:
        reason = (result.stderr or result.stdout).strip().splitlines() or ["no reason given"]
        raise UserError(f"git {arguments[-1]} failed in {directory}: {reason[0]}")
    return result.stdout.strip()
