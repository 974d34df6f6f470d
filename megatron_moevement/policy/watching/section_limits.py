# SPDX-License-Identifier: Apache-2.0
"""How long a section of a rank's work may take: what the launcher says, or learned from a run.

A limit that is learned is a multiple of the longest time seen. One that was learned before counts
half, so that one slow run does not stay for ever; nvidia-resiliency-ext merges them alike
(`fault_tolerance/timeouts_calc.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

OUTSIDE = "out_of_section"
"""Stands for all that lies in no section."""


@dataclasses.dataclass(frozen=True)
class SectionLimits:
    """Limits of sections.

    Attributes:
        seconds: by section, `OUTSIDE` among them; None is no limit.
    """

    seconds: Mapping[str, float | None]
    learned: frozenset[str] = frozenset()

    def learn(self, longest_s: Mapping[str, float], factor: float) -> SectionLimits:
        """Returns the limits after a run, or a part of it.

        Args:
            longest_s: the longest time of each section that has one; of a section that is not
                limited by name nothing is learned.
            factor: a limit is so many times as long.
        """
        seconds = dict(self.seconds)
        found = frozenset(longest_s) & frozenset(seconds)
        for section in found:
            limit_s = factor * longest_s[section]
            known_s = seconds[section]
            if section in self.learned and known_s is not None:
                limit_s = (limit_s + known_s) / 2
            seconds[section] = limit_s
        return SectionLimits(seconds, self.learned | found)

    def document(self) -> dict[str, Any]:
        """Returns the limits as nvidia-resiliency-ext keeps them."""
        inside = {name: limit for name, limit in self.seconds.items() if name != OUTSIDE}
        sections = {
            "section": inside,
            OUTSIDE: self.seconds.get(OUTSIDE),
            "calculated_sections": sorted(self.learned - {OUTSIDE}),
            "is_out_of_section_calculated": OUTSIDE in self.learned,
        }
        return {"current_timeouts": {"section": sections}}

    def updated(self, document: Mapping[str, Any]) -> SectionLimits:
        """Returns these limits with what an earlier run learned, of sections that are known here.

        Raises:
            KeyError: the document lacks something.
            TypeError: something in it is of another type.
            ValueError: a limit is no number.
        """
        found = document["current_timeouts"]["section"]
        outside = [OUTSIDE] if found["is_out_of_section_calculated"] else []
        learned = {*found["calculated_sections"], *outside} & set(self.seconds)
        limits = {**found["section"], OUTSIDE: found[OUTSIDE]}
        seconds = {**self.seconds, **{name: float(limits[name]) for name in learned}}
        return SectionLimits(seconds, self.learned | learned)


def longest_of_all(ranks: Iterable[Mapping[str, float | None]]) -> dict[str, float]:
    """Returns the longest time of each section over all ranks; a rank without one hinders it.

    Args:
        ranks: what each rank has seen; None where it has not seen enough.
    """
    merged: dict[str, float] = {}
    known = list(ranks)
    for section in known[0]:
        times = [rank.get(section) for rank in known]
        seen = [time for time in times if time is not None]
        if len(seen) == len(times):
            merged[section] = max(seen)
    return merged
