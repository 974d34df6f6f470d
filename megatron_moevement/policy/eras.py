"""Eras: what lies before a rollback to a durable checkpoint must not mix with what it began."""

from __future__ import annotations

import dataclasses

from megatron_moevement.policy.facts import Condition, Facts, LiveState, ProcessFacts
from megatron_moevement.policy.rollforward import lasting


def of_newest_era(facts: Facts) -> Facts:
    """Returns the facts by process, without what a process has from before a rollback.

    A fault in the middle of a rollback leaves some ranks on either side of it. They agreed on it
    because nothing else was left, so those that did not get there have nothing to offer. What new
    processes find counts where it is of the era of those that live: a machine that was away may
    bring back another history.
    """
    knowing = [process for process in facts.processes if process.committed is not None]
    newest = max((process.era for process in lasting(knowing)), default=0)
    processes = tuple(
        process if process.era == newest else _without_memory_of(process)
        for process in sorted(facts.processes, key=lambda process: process.process)
    )
    return dataclasses.replace(facts, processes=processes)


def _without_memory_of(process: ProcessFacts) -> ProcessFacts:
    return ProcessFacts(
        process.process,
        process.domain,
        process.rank,
        None,
        LiveState(Condition.ABSENT),
        epoch=process.epoch,
        holds=process.holds,
        is_new=process.is_new,
    )
