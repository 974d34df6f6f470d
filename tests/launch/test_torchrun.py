# SPDX-License-Identifier: Apache-2.0
"""`torchrun` starts the ranks of a protected job, as docs/use/megatron_scripts.md has it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_moevement.runtime.observation.events import EventName, read_events

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6


@pytest.mark.distributed
def test_torchrun_trains_two_stages_with_protection(tmp_path):
    flags = ["--moevement-backend", "cpu", "--model-preset", "tiny", "--mock-data"]
    flags += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "256", "--lr", "1e-3"]
    flags += ["--micro-batch-size", "1", "--global-batch-size", "2", "--train-iters", str(STEPS)]
    flags += ["--pipeline-model-parallel-size", "2", "--log-interval", "1", "--eval-iters", "0"]
    flags += ["--moevement-store-dir", str(tmp_path / "stores"), "--moevement-window", "2"]
    flags += ["--moevement-replicas", "1", "--moevement-strategy", "moevement"]
    flags += ["--moevement-event-dir", str(tmp_path / "events")]
    torchrun = Path(sys.executable).with_name("torchrun")
    command = [torchrun, "--standalone", "--nproc-per-node", "2", ROOT / "pretrain_moe.py", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    steps = [line for line in result.stdout.splitlines() if " iteration " in line]
    expected = list(range(1, STEPS + 1))
    assert [int(line.split(" iteration ")[1].split("/")[0]) for line in steps] == expected
    told = {one.event for one in read_events(tmp_path / "events")}
    assert EventName.WINDOW_PERSISTED in told
    assert list((tmp_path / "stores").rglob("*")) == []  # it is removed at the end
