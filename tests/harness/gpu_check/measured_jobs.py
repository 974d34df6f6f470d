# SPDX-License-Identifier: Apache-2.0
"""Jobs of one rank that are measured, with each iteration captured or with nothing protected."""

from __future__ import annotations

import dataclasses
import json
import runpy
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_moevement.runtime.observation.events import EventName, EventRecord
from tests.harness.gpu_check.jobs import Jobs
from tests.harness.gpu_check.results import Scale

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = Path(__file__).with_name("measured_pretrain.py")
SMALL = (
    "--model-preset=tiny",
    "--num-layers=1",
    "--num-experts=4",
    "--vocab-size=256",
    "--seq-length=16",
    "--micro-batch-size=1",
    "--global-batch-size=2",
)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a job was measured by.

    Attributes:
        iterations: its events, of the steps that count.
        waits: as `waits_of` returns them.
        device: as `device_time_of` returns it.
    """

    iterations: Sequence[EventRecord]
    peak_bytes: int
    waits: Mapping[str, Any]
    device: Mapping[str, float]
    failures: Sequence[str]


def flags_of(scale: Scale) -> tuple[str, ...]:
    """Returns the flags of a model of 1B parameters, or of a small one."""
    billion: tuple[str, ...] = runpy.run_path(str(ROOT / "benchmarks" / "throughput.py"))[
        "ONE_BILLION"
    ]
    return billion if scale is Scale.FULL else (*billion, *SMALL)


def run_measured(
    folder: Path,
    name: str,
    flags: Sequence[str],
    *,
    warm_up: int,
    profile: str = "1:0",
    pieces: str = "0:0",
) -> Measured:
    """Runs a job.

    Args:
        name: of its files; with `on` in front, its iterations are captured.
        warm_up: steps that don't count.
        profile: which steps, as FIRST:STEPS.
        pieces: steps before the size of pieces changes, and between two changes; 0: it does not.
    """
    measure = folder / f"{name}.json"
    with tempfile.TemporaryDirectory(prefix="store-", dir=folder) as store:
        own = (f"--measure={measure}", f"--profile={profile}", f"--pieces={pieces}")
        jobs = Jobs(folder, (*own, *flags, "--moevement-no-progress-bar"), program=PROGRAM)
        on = (
            "--moevement-strategy=moevement",
            "--moevement-window=4",
            "--moevement-replicas=0",
            f"--moevement-store-dir={store}",
        )
        ended = jobs.run(name, *(on if name.startswith("on") else ()))
    found = json.loads(measure.read_text(encoding="utf-8")) if measure.exists() else {}
    iterations = [event for event in ended.events if event.event is EventName.ITERATION]
    return Measured(
        iterations=[event for event in iterations if event.iteration > warm_up],
        peak_bytes=found.get("peak_bytes", 0),
        waits=found.get("waits", {}),
        device=found.get("device", {}),
        failures=ended.failures,
    )
