# SPDX-License-Identifier: Apache-2.0
"""Scheduling: what a simulated process has of schedules to come, in one generation."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from megatron_moevement.policy.watching.schedule_maker import Noted
from megatron_moevement.policy.watching.window_choice import WindowChoice
from megatron_moevement.policy.window.ordering import Ordering
from megatron_moevement.policy.window.popularity import Popularity
from megatron_moevement.policy.window.schedule import WindowSchedule
from megatron_moevement.policy.window.timetable import Proposal
from megatron_moevement.testing.world.meter import Meter


class Proposed(NamedTuple):
    """A proposed schedule that a process has in whole."""

    proposal: Proposal
    schedule: WindowSchedule


class Wish(NamedTuple):
    """What a schedule is made from: the W that is given, scores, and the digest of the newest."""

    window: int
    ordered_by: tuple[int, ...]
    newest: str


@dataclasses.dataclass
class Scheduling:
    """Of one process in one generation.

    Attributes:
        known: of the experts.
        meter: what it measures.
        proposed: the newest proposed schedule, once it is here.
        announced: the newest version that any rank has told of.
        is_busy: whether a proposal is being made, or is on its way here.
        noted: measurements that no choice of W has gone by.
        choice: the last choice of W.
        settled: what led to no other schedule.
    """

    known: Popularity = Popularity(Ordering.INDEX)  # noqa: RUF009  (frozen)
    meter: Meter = dataclasses.field(default_factory=Meter)
    proposed: Proposed | None = None
    announced: int = 0
    is_busy: bool = False
    noted: Noted | None = None
    choice: WindowChoice | None = None
    settled: Wish | None = None
