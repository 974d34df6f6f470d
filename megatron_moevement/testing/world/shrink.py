# SPDX-License-Identifier: Apache-2.0
"""Shrinking: the smallest world that still breaks the same invariant."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from megatron_moevement.policy.job.ranks import Layout
from megatron_moevement.policy.job.segments import Ends
from megatron_moevement.policy.window.ordering import Ordering
from megatron_moevement.testing.world.conditions import UNCHANGING
from megatron_moevement.testing.world.scenario import Links, Scenario, ticks_per_step


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """Returns a smaller scenario that still fails in the same way, when no simpler one does."""
    while True:
        smaller = next((each for each in _simplifications(scenario) if fails(each)), None)
        if smaller is None:
            return scenario
        scenario = smaller


def _simplifications(scenario: Scenario) -> Iterator[Scenario]:
    """Yields scenarios that are a little simpler, the boldest simplifications first."""
    faults = scenario.faults
    for place in range(len(faults)):
        yield dataclasses.replace(scenario, faults=faults[:place] + faults[place + 1 :])
    changes = scenario.changes
    for place in range(len(changes)):
        yield dataclasses.replace(scenario, changes=changes[:place] + changes[place + 1 :])
    yield from _simpler_conditions(scenario)
    for smaller in _smaller_jobs(scenario):
        yield smaller
        ratio = ticks_per_step(smaller) / ticks_per_step(scenario)
        if ratio < 1:
            yield _with_ticks(smaller, [int(fault.tick * ratio) for fault in faults])
    for place, fault in enumerate(faults):
        for tick in (fault.tick // 2, fault.tick * 7 // 8):
            ticks = [tick if i == place else other.tick for i, other in enumerate(faults)]
            if 0 <= tick < fault.tick and ticks == sorted(ticks):
                yield _with_ticks(scenario, ticks)


def _simpler_conditions(scenario: Scenario) -> Iterator[Scenario]:
    """Yields the scenario with less that it chooses its schedules by."""
    conditions = scenario.conditions
    for simpler in (
        UNCHANGING,
        dataclasses.replace(conditions, ordering=Ordering.INDEX, routings=()),
        dataclasses.replace(conditions, limits=None, speeds=()),
        dataclasses.replace(conditions, speeds=conditions.speeds[:1]),
        dataclasses.replace(conditions, routings=()),
    ):
        if simpler != conditions:
            yield dataclasses.replace(scenario, conditions=simpler)


def _with_ticks(scenario: Scenario, ticks: Sequence[int]) -> Scenario:
    faults = zip(scenario.faults, ticks, strict=True)
    moved = (dataclasses.replace(fault, tick=tick) for fault, tick in faults)
    return dataclasses.replace(scenario, faults=tuple(moved))


def _smaller_jobs(scenario: Scenario) -> Iterator[Scenario]:
    """Yields the scenario with one thing about the job smaller or simpler."""
    layout = scenario.layout
    stages = max(layout.pp - 1, 1)
    for change in (
        {"layout": Layout(layout.pp, 1, 1, 1, layout.ep, layout.chunks)},
        {"layout": Layout(layout.pp, layout.dp, 1, 1, 1, layout.chunks)},
        {"layout": Layout(stages, layout.dp, 1, 1, layout.ep, layout.chunks if stages > 1 else 1)},
        {"layout": Layout(layout.pp, layout.dp, 1, 1, layout.ep, 1)},
        {"micro_batches": 1},
        {"window": max(scenario.window - 1, 1)},
        {"steps": max(scenario.steps - 1, 1)},
        {"spares": max(scenario.spares - 1, 0)},
        {"replicas": max(scenario.replicas - 1, 0)},
        {"experts_per_rank": 1},
        {"processes_per_domain": 1},
        {"links": Links.DEFAULT},
        {"ends": Ends.INDEPENDENT},
        {"durable_every": 0},
        {"loads": True},
        {"permuted": False},
        {"layouts": False},
        {"shared_memory": False},
        {"overflows": ()},
    ):
        smaller = dataclasses.replace(scenario, **change)
        if smaller != scenario:
            yield smaller
