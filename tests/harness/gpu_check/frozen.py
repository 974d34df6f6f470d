# SPDX-License-Identifier: Apache-2.0
"""A step that is replayed with frozen operators: no other bits, and less time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.harness.frozen_step import compare_frozen, opened_frozen_step, random_active
from tests.harness.gpu_check.jobs import DETERMINISTIC
from tests.harness.gpu_check.results import Found, Scale
from tests.harness.tiny_job import TINY

ROOT = Path(__file__).resolve().parents[3]
_BITS = {
    Scale.SMALL: (),
    Scale.FULL: (
        "--hidden-size=512",
        "--ffn-hidden-size=1024",
        "--moe-ffn-hidden-size=512",
        "--num-experts=8",
        "--seq-length=256",
    ),
}
_TIMED = {
    Scale.SMALL: (
        "--rounds=1",
        "--hidden-size=32",
        "--num-attention-heads=4",
        "--num-experts=2",
        "--moe-ffn-hidden-size=32",
        "--vocab-size=96",
        "--seq-length=16",
    ),
    Scale.FULL: (
        "--rounds=15",
        "--num-layers=4",
        "--hidden-size=2048",
        "--num-attention-heads=16",
        "--num-experts=8",
        "--moe-ffn-hidden-size=1408",
        "--vocab-size=32000",
        "--seq-length=2048",
    ),
}
_SEEDS = range(5)


def compare_bits(scale: Scale, folder: Path) -> Found:
    """Repeats a step with operators frozen that are drawn, with all trained, and with none."""
    del folder
    os.environ.update(DETERMINISTIC)
    flags = ("--bf16", "--moe-grouped-gemm", "--deterministic-mode", *_BITS[scale])
    problems = []
    with opened_frozen_step(TINY, flags) as step:
        operators = step.operators()
        expected = step.run(frozenset(operators))
        drawn = {f"draw {seed}": random_active(operators, seed) for seed in _SEEDS}
        for name, active in {"all": frozenset(operators), **drawn, "none": frozenset()}.items():
            different, _ = compare_frozen(step, expected, active)
            problems += [
                f"{len(active)} of {len(operators)} trained ({name}): {what} differs: {names[:3]}"
                for what, names in different.items()
            ]
    return Found({"operators": len(operators), "steps compared": len(_SEEDS) + 2}, problems)


def time_steps(scale: Scale, folder: Path) -> Found:
    """Runs the benchmark of a step by its share of frozen operators."""
    del folder
    benchmark = ROOT / "benchmarks" / "frozen_step.py"
    command = [sys.executable, str(benchmark), *_TIMED[scale], "--bf16", "--moe-grouped-gemm"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        return Found({}, [f"the benchmark ended with {result.returncode}", result.stderr[-1500:]])
    rows = [line.strip("| ").split(" | ") for line in result.stdout.splitlines()[2:]]
    figures = {f"{row[0]} frozen": f"{row[2]} ms, ratio {row[3]}" for row in rows}
    return Found(figures, [] if rows else ["the benchmark has told nothing"])
