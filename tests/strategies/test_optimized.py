# SPDX-License-Identifier: Apache-2.0
"""Python without assertions: nothing that a recovery does hangs on one."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.harness.interruption import digest_differences
from tests.harness.protected_run import Case
from tests.harness.restarted_run import restartable_program

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(300)]

LAUNCHER = Path(__file__).parents[2] / "scripts" / "run_local.sh"
CASE = dataclasses.replace(Case.of("vpp2 fp32 replicated no-dropout", 2), replicas=1, deaths=1)
KILLED = CASE.protected_from + 2


def test_a_recovery_without_assertions_ends_with_the_same_bits(uninterrupted, text, tmp_path):
    program = restartable_program(CASE, None, text, 1)
    digest = tmp_path / "digest.json"
    flags = [
        *program.flags,
        f"--train-iters={CASE.train_iters}",
        f"--data-cache-path={tmp_path / 'index'}",
        f"--moevement-store-dir={tmp_path / 'store'}",
        f"--moevement-state-digest={digest}",
        f"--moevement-faults=kill:{KILLED}:backward@1",
    ]
    ended = subprocess.run(
        [LAUNCHER, "-n", "2", "-s", "1", "--", *flags],
        env={**os.environ, "PYTHONOPTIMIZE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert ended.returncode == 0, ended.stderr
    assert " loss of " in ended.stderr
    assert digest_differences(json.loads(digest.read_text()), uninterrupted(CASE)) == []
