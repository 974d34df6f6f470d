# SPDX-License-Identifier: Apache-2.0
"""How often a step waits for the device, with the strategy off and on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.harness.gpu_check.measured_jobs import flags_of, run_measured
from tests.harness.gpu_check.results import Found, Scale

ADDED = 1.0
"""Waits of the training thread in a step that a strategy may add: that of the commit barrier."""
_FIRST, _STEPS = 12, 4


def count(scale: Scale, folder: Path) -> Found:
    """Profiles steps of two jobs; a small model has the calls of a large one."""
    del scale
    flags = (*flags_of(Scale.SMALL), f"--train-iters={_FIRST + _STEPS}")
    jobs = {
        kind: run_measured(folder, kind, flags, warm_up=0, profile=f"{_FIRST}:{_STEPS}")
        for kind in ("off", "on")
    }
    failures = [each for one in jobs.values() for each in one.failures]
    if failures:
        return Found({}, failures)
    return judged(jobs["off"].waits, jobs["on"].waits)


def judged(off: Mapping[str, Any], on: Mapping[str, Any]) -> Found:
    """Compares what the traces counted."""
    figures = {
        f"{kind}, {thread}, {call}, a step": number / waits["steps"]
        for kind, waits in (("off", off), ("on", on))
        for thread in ("training thread", "other threads")
        for call, number in sorted(waits[thread].items())
    }
    before, after = (sum(each["training thread"].values()) / each["steps"] for each in (off, on))
    problems = [] if off["calls"] and on["calls"] else ["the trace has no call of the runtime"]
    if after - before > ADDED:
        problems.append(f"the training thread waits {after - before:g} times more in a step")
    return Found({"added on the training thread, a step": after - before, **figures}, problems)
