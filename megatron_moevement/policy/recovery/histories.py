# SPDX-License-Identifier: Apache-2.0
"""Eras: what lies before a rollback to a durable checkpoint must not mix with what it began."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable

from megatron_moevement.policy.facts.facts import Condition, Facts, LiveState, ProcessFacts
from megatron_moevement.policy.recovery.rollforward import lasting


def next_rollbacks(known: Iterable[int], now_s: float) -> int:
    """Returns the era of a history that begins, whether a plan says so or nothing was found.

    It is later than all that is known of, and than what a machine that is away may bring back.

    Args:
        now_s: seconds since the epoch, on the same clock for all.
    """
    return max(max(known) + 1, int(now_s))


def of_newest_history(facts: Facts) -> Facts:
    """Returns the facts by process, without what one has from before a rollback or new windows.

    A fault in the middle of a rollback leaves some ranks on either side of it. They agreed on it
    because nothing else was left, so those that did not get there have nothing to offer. What new
    processes find counts where it is of the era of those that live: a machine that was away may
    bring back another history. The same holds for windows from before all windows began anew: a
    launch may bring some back, and no schedule in force continues them.

    Facts that are so already are returned as they are, with all that was derived from them.
    """
    knowing = [process for process in facts.processes if process.committed is not None]
    newest = max((process.rollbacks for process in lasting(knowing)), default=0)
    first_version = max(
        (
            each.timetable.first_version
            for each in facts.processes
            if each.rollbacks == newest and each.timetable is not None
        ),
        default=0,
    )
    processes = tuple(
        _since(process, first_version)
        if process.rollbacks == newest
        else _without_memory_of(process)
        for process in sorted(facts.processes, key=lambda process: process.process)
    )
    if processes == facts.processes:
        return facts
    return dataclasses.replace(facts, processes=processes)


def _since(process: ProcessFacts, first_version: int) -> ProcessFacts:
    """Returns the facts of a process without windows from before they last began anew."""
    live, persisted, timetable = process.live, process.persisted, process.timetable
    if live.window is not None and live.window.schedule_version < first_version:
        live = LiveState(Condition.ABSENT)
    if persisted is not None and persisted.schedule_version < first_version:
        persisted = None
    if timetable is not None and timetable.first_version < first_version:
        timetable = None
    holdings = process.holdings
    if any([held.window.schedule_version < first_version for held in holdings]):  # noqa: C419
        holdings = tuple(held for held in holdings if held.window.schedule_version >= first_version)
    was = process.live, process.persisted, process.timetable, process.holdings
    if all(map(operator.is_, was, (live, persisted, timetable, holdings))):
        return process
    return dataclasses.replace(
        process, live=live, persisted=persisted, timetable=timetable, holdings=holdings
    )


def _without_memory_of(process: ProcessFacts) -> ProcessFacts:
    return ProcessFacts(
        process.process,
        process.domain,
        process.rank,
        None,
        LiveState(Condition.ABSENT),
        replica_id=process.replica_id,
        is_new=process.is_new,
        holders=process.holders,
    )
