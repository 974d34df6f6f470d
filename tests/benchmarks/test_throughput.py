# SPDX-License-Identifier: Apache-2.0
"""The command that measures a machine with a GPU, on one without: its flags and its line hold."""

import re
from pathlib import Path

import pytest

THROUGHPUT = Path(__file__).resolve().parents[2] / "benchmarks" / "throughput.py"
SMALL = (
    "--iterations=2",
    "--model-preset=tiny",
    "--num-layers=1",
    "--num-experts=4",
    "--vocab-size=256",
    "--seq-length=16",
    "--micro-batch-size=1",
    "--global-batch-size=2",
)

pytestmark = pytest.mark.distributed


def test_a_small_model_is_measured_in_one_line(megatron_fork_server):
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""}
    job = megatron_fork_server.start_program(THROUGHPUT, SMALL, world_size=1, env=no_gpu)
    with job:
        job.wait().check()
        (line,) = job.stdout(0).splitlines()
    told = re.fullmatch(
        r"cpu: 0\.\d{3} B parameters, ([\d,]+) tokens/s \(([\d.]+) ms an iteration, "
        r"([\d.]+) to ([\d.]+)\), peak memory [\d.]+ GiB",
        line,
    )
    assert told is not None, line
    tokens, typical_ms, least_ms, most_ms = (float(each.replace(",", "")) for each in told.groups())
    assert least_ms <= typical_ms <= most_ms
    # All that rounding may have changed: 2 samples of 16 tokens in an iteration.
    least, most = (2 * 16 * 1e3 / (typical_ms + rounded) for rounded in (0.06, -0.06))
    assert least - 0.5 <= tokens <= most + 0.5
