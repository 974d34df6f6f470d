# SPDX-License-Identifier: Apache-2.0
"""Shrinking: a smaller scenario that fails in the same way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from tests.harness.explorer.history import History, Launch
from tests.harness.explorer.job import (
    DrawnJob,
    Model,
    Protection,
    Training,
)
from tests.harness.explorer.scenario import Scenario


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool], tries: int) -> Scenario:
    """Returns a smaller scenario that still fails.

    Args:
        scenario: one that fails.
        fails: whether a scenario fails in the way that matters.
        tries: how often it is asked.
    """
    while True:
        for smaller in simplifications(scenario):
            if tries <= 0:
                return scenario
            tries -= 1
            if fails(smaller):
                scenario = smaller
                break
        else:
            return scenario


def simplifications(scenario: Scenario) -> Iterator[Scenario]:
    """Yields scenarios that are simpler in one respect: first with fewer strikes."""
    launches = scenario.history.launches
    for history in _shorter(launches):
        yield dataclasses.replace(scenario, history=history)
    for job in _plainer(scenario.job):
        yield dataclasses.replace(scenario, job=job)


def _shorter(launches: tuple[Launch, ...]) -> Iterator[History]:
    if len(launches) > 1:
        for number in range(len(launches)):
            yield History(launches[:number] + launches[number + 1 :])
    for number, launch in enumerate(launches):
        for name in ("faults", "kills"):
            strikes = getattr(launch, name)
            if len(launch.faults) + len(launch.kills) < 2:
                continue
            for place in range(len(strikes)):
                rest = strikes[:place] + strikes[place + 1 :]
                fewer: Any = {name: rest}
                shorter = dataclasses.replace(launch, **fewer)
                yield History((*launches[:number], shorter, *launches[number + 1 :]))


def _plainer(job: DrawnJob) -> Iterator[DrawnJob]:
    """Yields jobs of which one thing is as it is by default; the strikes must stay possible."""
    if job.layout.vpp > 1:
        yield dataclasses.replace(job, layout=dataclasses.replace(job.layout, vpp=1))
    fixed = {"steps", "passes", "topk", "experts", "layers_per_chunk", "save_every"}
    for part, plain in (("training", Training()), ("model", Model()), ("protection", Protection())):
        drawn = getattr(job, part)
        for field in dataclasses.fields(drawn):
            value = getattr(plain, field.name)
            if field.name in fixed or getattr(drawn, field.name) == value:
                continue
            change: Any = {part: dataclasses.replace(drawn, **{field.name: value})}
            plainer = dataclasses.replace(job, **change)
            if job.protection.window == plainer.protection.window:
                yield plainer
