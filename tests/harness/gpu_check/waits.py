# SPDX-License-Identifier: Apache-2.0
"""Calls in a profiler's trace by which the host waits for the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

STEP = "gpu-check step"
"""Name of the range of a step in the trace, on the training thread."""
_Event = Mapping[str, Any]
WAITING = frozenset(
    {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"}
)


def steps_of(events: Iterable[_Event]) -> list[_Event]:
    """Returns the ranges of the steps on the training thread; a GPU's timeline shows them again."""
    return [
        event
        for event in events
        if event.get("name") == STEP
        and event.get("ph") == "X"
        and event.get("cat") == "user_annotation"
    ]


def within(steps: Sequence[_Event], events: Iterable[_Event]) -> Iterator[_Event]:
    """Yields the events that begin in a step."""
    ranges = [(step["ts"], step["ts"] + step["dur"]) for step in steps]
    for event in events:
        if any(begin <= event.get("ts", -1) < end for begin, end in ranges):
            yield event


def waits_of(events: Iterable[_Event]) -> dict[str, Any]:
    """Counts them within the steps of a trace.

    Args:
        events: in the form of Chrome's traces, as torch writes it.

    Returns:
        The steps, the runtime's calls of any kind, and the number of each call that waits, of all
        steps together: on the training thread, and on others.
    """
    listed = list(events)
    steps = steps_of(listed)
    threads = {event["tid"] for event in steps}
    calls = [event for event in within(steps, listed) if event.get("cat") == "cuda_runtime"]
    waiting = [event for event in calls if event["name"] in WAITING]
    own = Counter(event["name"] for event in waiting if event["tid"] in threads)
    others = Counter(event["name"] for event in waiting if event["tid"] not in threads)
    return {
        "steps": len(steps),
        "calls": len(calls),
        "training thread": dict(own),
        "other threads": dict(others),
    }
