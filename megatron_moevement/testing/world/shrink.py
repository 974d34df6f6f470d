"""Shrinking: the smallest world that still breaks the same invariant."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from megatron_moevement.policy.ranks import Layout
from megatron_moevement.policy.segments import Ends
from megatron_moevement.testing.world.scenario import Links, Scenario


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """Returns a smaller scenario that still fails, when no simplification of it does.

    Args:
        scenario: one that fails.
        fails: whether a scenario fails in the way that matters.
    """
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
    layout = scenario.layout
    for change in (
        {"layout": Layout(layout.pp, 1, 1, 1, layout.ep, layout.chunks)},
        {"layout": Layout(layout.pp, layout.dp, 1, 1, 1, layout.chunks)},
        {"layout": Layout(max(layout.pp - 1, 1), layout.dp, 1, 1, layout.ep, layout.chunks)},
        {"layout": Layout(layout.pp, layout.dp, 1, 1, layout.ep, 1)},
        {"micro_batches": 1},
        {"window": max(scenario.window - 1, 1)},
        {"steps": scenario.steps - 1},
        {"spares": max(scenario.spares - 1, 0)},
        {"replicas": max(scenario.replicas - 1, 0)},
        {"processes_per_domain": 1},
        {"links": Links.DEFAULT},
        {"ends": Ends.INDEPENDENT},
        {"durable_every": 0},
        {"shared_memory": False},
        {"overflows": ()},
    ):
        smaller = dataclasses.replace(scenario, **change)
        if smaller != scenario and smaller.steps > 0:
            yield smaller
