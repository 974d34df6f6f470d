# SPDX-License-Identifier: Apache-2.0
"""Calls in a profiler's trace by which the host waits for the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

STEP = "gpu-check step"
"""Name of the range of a step in the trace, on the training thread."""
WAITING = frozenset(
    {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"}
)


def waits_of(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts them within the steps of a trace.

    Args:
        events: in the form of Chrome's traces, as torch writes it.

    Returns:
        The steps, the runtime's calls of any kind, and the number of each call that waits, of all
        steps together: on the training thread, and on others.
    """
    listed = list(events)
    steps = [event for event in listed if event.get("name") == STEP and event.get("ph") == "X"]
    # On a GPU the range shows again, on the device's timeline.
    steps = [event for event in steps if event.get("cat") == "user_annotation"]
    threads = {event["tid"] for event in steps}
    ranges = [(event["ts"], event["ts"] + event["dur"]) for event in steps]
    calls = [
        event
        for event in listed
        if event.get("cat") == "cuda_runtime"
        and any(begin <= event["ts"] < end for begin, end in ranges)
    ]
    waiting = [event for event in calls if event["name"] in WAITING]
    own = Counter(event["name"] for event in waiting if event["tid"] in threads)
    others = Counter(event["name"] for event in waiting if event["tid"] not in threads)
    return {
        "steps": len(steps),
        "calls": len(calls),
        "training thread": dict(own),
        "other threads": dict(others),
    }
