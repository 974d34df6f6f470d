# SPDX-License-Identifier: Apache-2.0
"""What the device did in the steps of a profiler's trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from tests.harness.gpu_check.waits import steps_of, within

_KERNEL, _COPY = "kernel", "gpu_memcpy"
_TO_HOST = "DtoH"


def device_time_of(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Returns milliseconds of a step, by what they were spent with.

    Kernels that take longer were slowed down by others' use of memory; without longer kernels, the
    device waited longer: for the host, or for a copy.

    Args:
        events: in the form of Chrome's traces, as torch writes it; times are microseconds.

    Returns:
        The step; on the stream of the computation, which has most kernels: its kernels, its copies
        to the host, and its idle time; on all others together: kernels, and copies to the host.
    """
    listed = list(events)
    steps = steps_of(listed)
    device = [each for each in within(steps, listed) if each.get("cat") in (_KERNEL, _COPY)]
    kernels = Counter(each["args"]["stream"] for each in device if each["cat"] == _KERNEL)
    if not kernels:
        return {}
    computation = kernels.most_common(1)[0][0]
    own = [each for each in device if each["args"]["stream"] == computation]
    others = [each for each in device if each["args"]["stream"] != computation]
    step_us = sum(step["dur"] for step in steps)
    found = {
        "step, ms": step_us,
        "kernels, ms": _spent(own, _KERNEL),
        "copies to the host, ms": _spent(own, _COPY, _TO_HOST),
        "idle, ms": step_us - _spent(own, _KERNEL) - _spent(own, _COPY),
        "kernels of other streams, ms": _spent(others, _KERNEL),
        "copies to the host of other streams, ms": _spent(others, _COPY, _TO_HOST),
    }
    return {name: total_us / len(steps) / 1e3 for name, total_us in found.items()}


def _spent(events: Iterable[Mapping[str, Any]], category: str, name: str = "") -> float:
    return sum(
        float(each["dur"]) for each in events if each["cat"] == category and name in each["name"]
    )
