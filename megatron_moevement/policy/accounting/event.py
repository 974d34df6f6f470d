# SPDX-License-Identifier: Apache-2.0
"""Events: what a process of a job records of what happens to it, with the time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any


class EventName(Enum):
    """What can happen; `event_kinds.py` has what each means, and its fields."""

    LAUNCHED = "launched"
    SPARE = "spare"
    PROCESS_START = "process_start"
    PROCESS_END = "process_end"
    PHASE = "phase"
    ITERATION = "iteration"
    EVALUATION = "evaluation"
    WINDOW_PERSISTED = "window_persisted"
    PROTECTION = "protection"
    TIER_WRITTEN = "tier_written"
    FAULT_INJECTED = "fault_injected"
    FAULT_DETECTED = "fault_detected"
    PLAN = "plan"
    REPLAY = "replay"
    AUDIT = "audit"
    REPLAY_DIFFERED = "replay_differed"
    RECOVERED = "recovered"
    CHECKPOINT_BEGUN = "checkpoint_begun"
    """One is written beside training from now on."""

    CHECKPOINT_SAVED = "checkpoint_saved"
    CHECKPOINT_FAILED = "checkpoint_failed"
    SCHEDULE = "schedule"
    WINDOW_CHOSEN = "window_chosen"
    POPULARITY = "popularity"
    LOSSES = "losses"
    HOLDERS_CHANGED = "holders_changed"
    SLOT_DAMAGED = "slot_damaged"
    SLOW_RANK = "slow_rank"


PERIODIC = frozenset(
    {
        *(EventName.ITERATION, EventName.WINDOW_PERSISTED),
        *(EventName.POPULARITY, EventName.AUDIT, EventName.TIER_WRITTEN),
    }
)
"""What recurs while nothing happens: of old ones only sums are kept."""

DURABLE = frozenset(
    {
        *(EventName.LAUNCHED, EventName.SPARE, EventName.PROCESS_START, EventName.PROCESS_END),
        *(EventName.FAULT_INJECTED, EventName.FAULT_DETECTED, EventName.PLAN),
        *(EventName.REPLAY_DIFFERED, EventName.RECOVERED),
    }
)
"""What is in its file, with all before it, before the process goes on: it may die right after it.

No step has any of them; all others are written beside training."""

SHARED = frozenset(
    {
        *(EventName.WINDOW_PERSISTED, EventName.PROTECTION, EventName.POPULARITY),
        *(EventName.LOSSES, EventName.WINDOW_CHOSEN),
    }
)
"""What is the same on all ranks: rank 0 records it.

Plans and schedules are, too, but each rank records its own: the next fault may take rank 0 before
it has, and nothing records them again; that plans are equal is to be seen, besides."""


@dataclasses.dataclass(frozen=True)
class EventRecord:
    """One event as it was written.

    Attributes:
        time: seconds since the epoch, of the clock of the process's machine.
        generation: restarts before it.
    """

    time: float
    logical_rank: int
    pid: int
    generation: int
    iteration: int
    event: EventName
    fields: Mapping[str, Any]


History = Callable[[], Iterable[EventRecord]]
"""Reads the events of one process in their order; it can be called again."""
