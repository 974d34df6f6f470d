# SPDX-License-Identifier: Apache-2.0
"""What the device did in a step, with the strategy off and on: where a longer step comes from."""

from __future__ import annotations

from pathlib import Path

from tests.harness.gpu_check.measured_jobs import Measured, flags_of, run_measured
from tests.harness.gpu_check.results import Found, Scale

_FIRST, _STEPS = 12, 3


def measure(scale: Scale, folder: Path) -> Found:
    """Profiles steps of two jobs."""
    flags = (*flags_of(scale), f"--train-iters={_FIRST + _STEPS}")
    jobs = {
        kind: run_measured(folder, kind, flags, warm_up=0, profile=f"{_FIRST}:{_STEPS}")
        for kind in ("off", "on")
    }
    failures = [each for one in jobs.values() for each in one.failures]
    figures = {
        f"{kind}, {name}": figure
        for kind, job in jobs.items()
        for name, figure in (*job.device.items(), *_waits_of_a_step(job))
    }
    return Found({} if failures else figures, failures)


def _waits_of_a_step(job: Measured) -> list[tuple[str, float]]:
    waits = job.waits.get("training thread", {})
    return [("waits of the training thread", sum(waits.values()) / _STEPS)]
