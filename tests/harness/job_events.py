# SPDX-License-Identifier: Apache-2.0
"""Events of jobs that are written down by hand, a step a second; their times begin at 1000 s."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_moevement.policy.accounting.account import ProcessAccount
from megatron_moevement.policy.accounting.event import EventName, EventRecord, History
from megatron_moevement.policy.accounting.parts import Part
from megatron_moevement.policy.recovery.lifecycle import Phase


def event(
    time: float,
    name: EventName,
    iteration: int = 0,
    *,
    rank: int = 0,
    generation: int = 0,
    **fields: Any,
) -> EventRecord:
    """Returns an event of a time, in seconds."""
    return EventRecord(1000.0 + time, rank, 1, generation, iteration, name, fields)


def read(histories: Sequence[Sequence[EventRecord]]) -> dict[str, History]:
    """Returns what reads the events of processes."""
    return {str(number): functools.partial(list, one) for number, one in enumerate(histories)}


def seconds(process: ProcessAccount) -> Mapping[Part, float]:
    """Returns the parts of a process, in seconds."""
    return {part: taken_us / 1e6 for part, taken_us in process.parts_us.items()}


def training(
    start: float, steps: int, *, first: int = 1, rank: int = 0, generation: int = 0
) -> Iterator[EventRecord]:
    """Yields the events of steps, of which 0.1 s are stall, and 0.1 s lie between two of them."""
    yield trains(start, rank, generation)
    for number in range(steps):
        at = start + number + 1
        yield event(
            *(at, EventName.ITERATION, first + number),
            rank=rank,
            generation=generation,
            duration_s=0.9,
            stall_s=0.1,
        )


def trains(at: float, rank: int = 0, generation: int = 0) -> EventRecord:
    """Returns the event that training begins."""
    name, phase = EventName.PHASE, Phase.TRAINING.value
    return event(at, name, rank=rank, generation=generation, phase=phase)


def interval(
    at: float, first: int, last: int, *, rank: int = 0, generation: int = 0
) -> EventRecord:
    """Returns the one event of steps like those of `training`."""
    number = last - first + 1
    return event(
        *(at, EventName.ITERATION, last),
        rank=rank,
        generation=generation,
        steps=number,
        began_s=1000.0 + at - number,
        ended_s=1000.0 + at,
        duration_s=0.9 * number,
        stall_s=0.1 * number,
    )


def restarted(at: float, generation: int, since: float, rank: int = 0) -> Iterator[EventRecord]:
    """Yields the events of a restart at a time and of a recovery of four seconds after it."""
    yield event(
        *(at, EventName.FAULT_DETECTED, 0),
        rank=rank,
        generation=generation,
        noticed_s=1000 + at - 2,
        last_step_s=1000 + since,
        teardown_s=1.0,
        rendezvous_s=1.0,
    )
    breakdown = {"build": 0.5, "plan": 0.5, "fetch": 1.0, "replay": 1.5, "reprotect": 0.0}
    yield event(
        *(at + 4, EventName.RECOVERED, 0),
        rank=rank,
        generation=generation,
        duration_s=3.5,
        breakdown_s={**breakdown, "wait": 0.5},
    )


def launched(process: int, *, launch: str = "a", at: float = 0.0) -> EventRecord:
    """Returns the first event of a process, which was started half a second before."""
    return event(
        *(at + 0.5, EventName.LAUNCHED),
        rank=-1,
        launch=launch,
        process=process,
        host="h",
        started_s=1000.0 + at,
    )


def ended(at: float, process: int, code: int, *, launch: str = "a") -> EventRecord:
    """Returns the end of a process, as its launcher records it."""
    return event(
        *(at, EventName.PROCESS_END),
        rank=-1,
        launch=launch,
        process=process,
        host="h",
        child=7,
        started_s=1000.0,
        code=code,
    )
