# SPDX-License-Identifier: Apache-2.0
"""Applies patches to an unpacked release: every touched file byte for byte as the patch says.

`git apply` does the work. Before and after it the blob id of every touched file is compared with
the one in the patch, so that an offset, a fuzzy match or a silently skipped file cannot pass.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.fork.series import Patch


def apply_series(tree: Path, patches: Iterable[Patch]) -> None:
    """Applies patches in order to the release unpacked in `tree`.

    Raises:
        UserError: A patch does not apply exactly; the tree is then of no further use.
    """
    for patch in patches:
        apply_patch(tree, patch)


def apply_patch(tree: Path, patch: Patch) -> None:
    """Applies one patch.

    Raises:
        UserError: A touched file is not exactly what the patch was made for, or git refuses.
    """
    for change in patch.changes:
        _require_blob(tree, change.path, change.before, f"{patch.name} does not apply")
    command = ["git", "apply", "--verbose", "--whitespace=nowarn", "-"]
    result = run_git(command, tree, patch.diff)
    said = result.stderr.strip().splitlines()
    wrong = [line for line in said if line.startswith("error") or "offset" in line]
    if result.returncode != 0 or wrong:
        reason = (wrong or said or ["no reason given"])[0]
        raise UserError(f"{patch.name} does not apply to {tree}: {reason}")
    for change in patch.changes:
        _require_blob(tree, change.path, change.after, f"{patch.name} was applied inexactly")


def run_git(
    command: list[str], tree: Path, text: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs git in `tree`, blind to any repository around it and to the caller's git variables.

    Raises:
        UserError: git is not installed.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environment["GIT_CEILING_DIRECTORIES"] = str(tree.resolve().parent)
    environment["LC_ALL"] = "C"
    try:
        return subprocess.run(
            command,
            cwd=tree,
            env=environment,
            input=text,
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
    except FileNotFoundError as error:
        raise UserError("git is needed to build the fork and was not found: install git") from error


def blob_id(content: bytes) -> str:
    """Returns git's object id of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _require_blob(tree: Path, path: str, expected: str | None, refusal: str) -> None:
    file = tree / path
    found = blob_id(file.read_bytes()) if file.is_file() else None
    if found != expected:
        want = f"blob {expected[:12]}" if expected else "no such file"
        have = f"blob {found[:12]}" if found else "no such file"
        raise UserError(f"{refusal}: {path} must be {want}, but is {have}")
