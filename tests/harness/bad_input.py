# SPDX-License-Identifier: Apache-2.0
"""Jobs that end with one line on standard error, and what they may not touch."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_moevement.training.program import main
from tests.harness.fork_server import ForkServer
from tests.harness.log_lines import log_lines
from tests.harness.tiny_job import TINY

_TIMEOUT_S = 30


def run_tiny(argv: Sequence[str], limit_bytes: int | None = None) -> int:
    """Runs the program as this rank of a tiny job, and returns its exit code.

    Args:
        argv: flags after those of the tiny job.
        limit_bytes: no file may become larger than this.
    """
    if limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    return int(main([*TINY, *argv]))


def refusal(server: ForkServer, argv: Sequence[str], world_size: int) -> str:
    """Returns the only line of a job that every rank leaves with exit code 2."""
    result = server.run(
        run_tiny, world_size=world_size, args=[list(argv)], timeout_s=_TIMEOUT_S
    ).check()
    assert result.values == (2,) * world_size
    return only_line("".join(rank.stderr for rank in result.ranks))


def only_line(text: str) -> str:
    """Returns the only line in which the program said that something is wrong."""
    (line,) = refused_lines(text)
    return line


def refused_lines(text: str) -> list[str]:
    """Returns the lines in which the program said that something is wrong."""
    told = list(log_lines(text))
    assert len(told) == len(text.splitlines()), text
    lines = [line for line in told if line.level not in {"INFO", "WARNING"}]
    assert {(line.level, line.program) for line in lines} == {("ERROR", "pretrain_moe.py")}
    return [line.text for line in lines]


def tree(folder: Path) -> dict[Path, bytes | None]:
    """Returns all paths below a folder with the contents of the files."""
    return {p: p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[None]:
    """Mounts a file system of a fixed size on a folder."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)
