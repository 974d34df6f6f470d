# SPDX-License-Identifier: Apache-2.0
"""`moevement check` for tests: what it says of a job."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from megatron_moevement.cli import main
from tests.harness.fork_server import ForkServer, RankResult

_TIMEOUT_S = 60


def run_check(argv: Sequence[str]) -> int:
    """Runs the command in a terminal of 80 columns; returns its exit code."""
    os.environ["COLUMNS"] = "80"
    return int(main(["check", *argv]))


def checked(server: ForkServer, argv: Sequence[str], timeout_s: float = _TIMEOUT_S) -> RankResult:
    """Returns how the command ended in a process of its own: exit code, output, errors."""
    result = server.run(run_check, world_size=1, args=[list(argv)], timeout_s=timeout_s)
    return result.check().ranks[0]


def foreseen(server: ForkServer, processes: int, flags: Sequence[str]) -> list[dict[str, Any]]:
    """Returns what each process of a job on this machine is said to take, in bytes.

    Args:
        processes: of the job, each a failure domain; spares by a flag of the job.
        flags: of the job.
    """
    cluster = ["-n", str(processes), "--failure-domain=process", "--json"]
    document = json.loads(checked(server, [*cluster, "--", *flags]).stdout)
    assert document["obstacles"] == []
    found: list[dict[str, Any]] = document["processes"]
    return found
