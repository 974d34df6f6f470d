# SPDX-License-Identifier: Apache-2.0
"""The time of an iteration that is captured against one of a job that nothing protects."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.harness.gpu_check.measured_jobs import Measured, flags_of, run_measured
from tests.harness.gpu_check.results import Found, Scale

LIMIT = 1.01
"""Of the ratio, at full scale."""
_ITERATIONS = {Scale.SMALL: 12, Scale.FULL: 35}
_WARM_UP = 10
_PAIRS = {Scale.SMALL: 1, Scale.FULL: 4}
_LONGEST_S = 400.0
"""No pair begins that would end later, if it takes as long as the longest before it."""
_GIB = 1 << 30


def measure(scale: Scale, folder: Path) -> Found:
    """Runs jobs in turns, with the strategy off and on."""
    flags = (*flags_of(scale), f"--train-iters={_ITERATIONS[scale]}")
    off: list[Measured] = []
    on: list[Measured] = []
    began_s = pair_began_s = time.monotonic()
    longest_s = 0.0
    for pair in range(_PAIRS[scale]):
        if time.monotonic() - began_s + longest_s > _LONGEST_S:
            break
        for kind, found in (("off", off), ("on", on)):
            found.append(run_measured(folder, f"{kind}{pair}", flags, warm_up=_WARM_UP))
            if found[-1].failures:
                return Found({}, found[-1].failures)
        ended_s = time.monotonic()
        longest_s, pair_began_s = max(longest_s, ended_s - pair_began_s), ended_s
    return judged(off, on, LIMIT if scale is Scale.FULL else None)


def judged(off: Sequence[Measured], on: Sequence[Measured], limit: float | None) -> Found:
    """Compares the jobs.

    Args:
        limit: of the ratio; None: it is only told.
    """
    off_s, on_s = _durations(off), _durations(on)
    captured = [event.fields for one in on for event in one.iterations]
    ratio = statistics.median(on_s) / statistics.median(off_s)
    figures: dict[str, Any] = {
        "off, ms": statistics.median(off_s) * 1e3,
        "on, ms": statistics.median(on_s) * 1e3,
        "ratio": ratio,
        "ratios of pairs": ", ".join(
            f"{statistics.median(_durations([b])) / statistics.median(_durations([a])):.4f}"
            for a, b in zip(off, on, strict=True)
        ),
        "iterations of each": len(on_s),
        "stall, ms (mean)": statistics.fmean(each["stall_s"] for each in captured) * 1e3,
        "stall, ms (most)": max(each["stall_s"] for each in captured) * 1e3,
        "captured, GB an iteration": statistics.fmean(each["captured_bytes"] for each in captured)
        / 1e9,
        "peak memory off, GiB": max(one.peak_bytes for one in off) / _GIB,
        "peak memory on, GiB": max(one.peak_bytes for one in on) / _GIB,
    }
    problems = []
    if not all(each["captured_bytes"] for each in captured):
        problems.append("an iteration was not captured")
    if limit is not None and not ratio <= limit:
        problems.append(f"the ratio is {ratio:.4f}, over the limit of {limit}")
    return Found(figures, problems)


def _durations(jobs: Sequence[Measured]) -> list[float]:
    return [event.fields["duration_s"] for one in jobs for event in one.iterations]
