# SPDX-License-Identifier: Apache-2.0
"""The timeline of a process in few numbers: what each moment was, as finely as there is room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_moevement.policy.accounting.parts import RECOVERY, Part, Span

SPANS = 250_000
"""Of all processes together, at most: about two megabytes of a page."""
_FINEST_US = 1_000
_COMMON = {Part.USEFUL, Part.STALL, Part.BETWEEN}
_SHOWN_FIRST = (Part.LOST, *RECOVERY)
"""What a moment is drawn as where it has any of it: short, and what a reader looks for."""
PARTS: Sequence[Part] = tuple(Part)


def encoded(spans: Sequence[Span], limit: int) -> Mapping[str, Any]:
    """Returns spans as pairs of a length and the number of a part, one after the other.

    Args:
        spans: of a process, without gaps, in the order of time.
        limit: of the number of spans. Where there are more, moments are put together, twice as
            many at a time until they fit; one with any part of a recovery, or with lost work, is
            drawn as that.

    Returns:
        `unit_us` of the lengths, and `spans`. The lengths add up to that of the whole, rounded.
    """
    unit_us = _FINEST_US
    found = _in_units(spans, unit_us)
    while len(found) > limit:
        unit_us *= 2
        found = _in_cells(spans, unit_us, limit)
    return {"unit_us": unit_us, "spans": [number for pair in found for number in pair]}


def _in_units(spans: Sequence[Span], unit_us: int) -> list[tuple[int, int]]:
    """Returns each span with its edges rounded; what is nothing then is left out."""
    if not spans:
        return []
    begun_us = spans[0].start_us
    found: list[tuple[int, int]] = []
    for span in spans:
        start, end = ((at - begun_us + unit_us // 2) // unit_us for at in span[:2])
        _append(found, end - start, span.part)
    return found


def _in_cells(spans: Sequence[Span], unit_us: int, limit: int) -> list[tuple[int, int]]:
    """Returns what each cell of so many microseconds is drawn as.

    It stops where there are more than the limit, and returns what it has.
    """
    found: list[tuple[int, int]] = []
    begun_us = spans[0].start_us
    cell, inside = 0, dict[Part, int]()
    for span in spans:
        if len(found) > limit:
            return found
        start_us, end_us = span.start_us - begun_us, span.end_us - begun_us
        while start_us < end_us:
            at = start_us // unit_us
            if at != cell:
                _append(found, 1, _shown(inside))
                cell, inside = at, {}
            until_us = min(end_us, (at + 1) * unit_us)
            if until_us - start_us == unit_us:  # and as many more as are of this part alone
                whole = (end_us - start_us) // unit_us
                _append(found, whole - 1, span.part)
                cell += whole - 1
                until_us = start_us + whole * unit_us
            inside[span.part] = inside.get(span.part, 0) + until_us - start_us
            start_us = until_us
    _append(found, 1, _shown(inside))
    return found


def _append(found: list[tuple[int, int]], length: int, part: Part) -> None:
    if length <= 0:
        return
    number = PARTS.index(part)
    if found and found[-1][1] == number:
        found[-1] = (found[-1][0] + length, number)
    else:
        found.append((length, number))


def _shown(inside: Mapping[Part, int]) -> Part:
    """Returns what a cell is drawn as: rare parts before the steps, then the longest."""
    first = [part for part in _SHOWN_FIRST if part in inside]
    rare = first or [part for part in inside if part not in _COMMON] or list(inside)
    return max(rare, key=lambda part: inside[part])
