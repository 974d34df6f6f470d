# SPDX-License-Identifier: Apache-2.0
"""Changes of the window schedule at steps that are known before.

A thread makes or reads a proposal beside the steps of its rank, and an order of experts is asked
for when enough of their tokens have changed. Here the thread is done before the next step begins,
and an order is asked for once: when a given step has reduced what was counted, and by scores in the
reverse order of the index, which the first slots have room for. Those of a few steps of a small
job may ask for the order that it has.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

from megatron_moevement.policy.window.popularity import Popularity
from megatron_moevement.policy.window.timetable import Timetable
from megatron_moevement.strategies.moevement.schedules.exchange import ScheduleExchange
from megatron_moevement.strategies.moevement.schedules.popularity_watch import PopularityWatch

VARIABLE = "PUNCTUAL_CHANGES"
"""Has the first step that may ask for an order."""


def install() -> None:
    """Makes changes punctual in this process, if the variable is set."""
    first = os.environ.get(VARIABLE)
    if first is None:
        return
    for name in ("propose", "fetch"):
        setattr(ScheduleExchange, name, _awaited(getattr(ScheduleExchange, name)))
    owner: Any = PopularityWatch
    owner.at_barrier = _asking_once(PopularityWatch.at_barrier, int(first))


def _awaited(begin: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(begin)
    def begin_and_end(self: ScheduleExchange, *args: Any) -> None:
        begin(self, *args)
        self.close()

    return begin_and_end


def _asking_once(
    at_barrier: Callable[[PopularityWatch, int, Timetable], Popularity | None], first: int
) -> Callable[[PopularityWatch, int, Timetable], Popularity | None]:
    @functools.wraps(at_barrier)
    def at_barrier_once(
        self: PopularityWatch, step: int, timetable: Timetable
    ) -> Popularity | None:
        before, found = self.known.ordered_by, at_barrier(self, step, timetable)
        if found is None:
            return None
        if found.scores and step >= first and not before:
            before = tuple(range(len(found.scores), 0, -1))
        return dataclasses.replace(found, ordered_by=before)

    return at_barrier_once
