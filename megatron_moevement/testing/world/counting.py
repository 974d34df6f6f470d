# SPDX-License-Identifier: Apache-2.0
"""Counting: what simulated ranks learn of their experts, window by window."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from megatron_moevement.policy.window.popularity import steps_to_reduce
from megatron_moevement.testing.world.process import Commands, Join, Process, Run
from megatron_moevement.testing.world.tokens import added

if TYPE_CHECKING:
    from megatron_moevement.testing.world.world import World

DECAY = 0.5
"""Of a moving average of tokens."""


def count(world: World, process: Process, run: Run) -> None:
    """Adds the tokens of a step that is being committed to those of its window."""
    if run.entry is None or not world.scenario.conditions.counts_tokens:
        return
    begins_window = run.entry.popularity is not None
    process.counted = process.counted.with_step(run.step, begins_window=begins_window)
    is_first = process.counted.first == run.step
    process.counts = run.counts if is_first else added(process.counts, run.counts)


def reduce_counts(world: World, process: Process, run: Run) -> Commands:
    """Learns, in the first step of a window, what is known of the experts from then on."""
    if run.plan is not None or run.entry is None or not world.scenario.conditions.counts_tokens:
        return
    steps, known = steps_to_reduce(process.timetable, run.step), process.scheduling.known
    if steps is None:
        return
    if steps:
        rank, own = process.place, process.counts if process.counted.are(steps) else None
        told = yield Join(("counts", run.step), world.shape.layout.ranks, rank, own, dict)
        newer = known.after_window(world.policies.reduced_counts(told, rank), DECAY)
        world.invariants.schedules.reduced(known, newer, steps)
        known = newer
    run.entry = dataclasses.replace(run.entry, popularity=known)


def recall(world: World, process: Process) -> Commands:
    """Takes the newest of what the ledger of any rank has of the experts."""
    if not world.scenario.conditions.counts_tokens:
        return
    own = None if process.rank is None else process.store.newest_popularity()
    told = yield world.all_join(process, "popularity", value=own, combine=dict)
    found = [(*each, number) for number, each in told.items() if each is not None]
    newest = max(found, key=lambda each: (each[0], each[2]), default=None)
    if newest is not None:
        process.scheduling.known = newest[1]
