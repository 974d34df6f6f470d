# SPDX-License-Identifier: Apache-2.0
"""Campaigns: many seeds through simulated worlds, and what came of them."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from megatron_moevement.testing.mutations import mutation_named
from megatron_moevement.testing.world.policies import Policies
from megatron_moevement.testing.world.scenario import Scenario, scenario_of
from megatron_moevement.testing.world.shrink import shrink
from megatron_moevement.testing.world.violations import ViolationError
from megatron_moevement.testing.world.world import Outcome, World

CHUNK = 50
"""Seeds that a worker takes at a time."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A world in which something does not hold.

    Attributes:
        scenario: the world.
        what: the invariant, or the error that a decision raised.
        detail: what does not hold.
        story: what happened up to there, line by line.
    """

    scenario: Scenario
    what: str
    detail: str
    story: str


@dataclasses.dataclass
class Tally:
    """What came of many seeds.

    Attributes:
        seeds: how many worlds ran.
        verdicts: in how many seeds each verdict was reached.
        scopes: in how many seeds each kind of scope was replayed.
        replayed_steps: how many recoveries replayed so many steps.
        places: the fault places of production that processes came to.
        schedules: in how many seeds another schedule was considered, by the reason.
        unfinished: worlds whose job ended before its last step.
        ticks: commands that all worlds executed.
        failures: seeds in which something did not hold.
    """

    seeds: int = 0
    verdicts: Counter[str] = dataclasses.field(default_factory=Counter)
    scopes: Counter[str] = dataclasses.field(default_factory=Counter)
    replayed_steps: Counter[int] = dataclasses.field(default_factory=Counter)
    places: set[str] = dataclasses.field(default_factory=set)
    schedules: Counter[str] = dataclasses.field(default_factory=Counter)
    unfinished: int = 0
    ticks: int = 0
    failures: list[int] = dataclasses.field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Counts a world that ran to its end."""
        plans = outcome.plans
        self.verdicts.update({plan.verdict.value for plan in plans})
        self.scopes.update({plan.scope_kind.value for plan in plans if plan.replays})
        self.replayed_steps.update(plan.replayed_steps for plan in plans if plan.replays)
        self.places |= {place.value for place in outcome.places}
        self.schedules.update(outcome.reasons)
        self.unfinished += outcome.aborted is not None
        self.ticks += outcome.ticks

    def merge(self, other: Tally) -> None:
        """Adds what another worker counted."""
        self.seeds += other.seeds
        self.verdicts.update(other.verdicts)
        self.scopes.update(other.scopes)
        self.replayed_steps.update(other.replayed_steps)
        self.places |= other.places
        self.schedules.update(other.schedules)
        self.unfinished += other.unfinished
        self.ticks += other.ticks
        self.failures += other.failures

    def histogram(self) -> dict[str, object]:
        """Returns the tally as a JSON object."""
        return {
            "seeds": self.seeds,
            "violations": len(self.failures),
            "verdicts": dict(sorted(self.verdicts.items())),
            "scopes": dict(sorted(self.scopes.items())),
            "replayed_steps": {str(k): n for k, n in sorted(self.replayed_steps.items())},
            "schedules": dict(sorted(self.schedules.items())),
            "unfinished_jobs": self.unfinished,
            "ticks": self.ticks,
        }


def play(scenario: Scenario, policies: Policies | None = None) -> Outcome | Failure:
    """Runs one world to its end, or to the first thing in it that does not hold."""
    world = World(scenario, policies)
    try:
        return world.run()
    except ViolationError as error:
        return _failure(world, error.invariant, str(error))
    except Exception as error:  # noqa: BLE001  (whatever a decision raises is a finding)
        return _failure(world, type(error).__name__, str(error))


def _failure(world: World, what: str, detail: str) -> Failure:
    world.report(f"VIOLATED {what}: {detail.removeprefix(f'{what}: ')}")
    return Failure(world.scenario, what, detail, "\n".join(world.story))


def play_seeds(seeds: Sequence[int], mutation: str | None) -> Tally:
    """Runs the worlds of some seeds; a worker process calls it."""
    policies = None if mutation is None else mutation_named(mutation).policies
    tally = Tally()
    for seed in seeds:
        tally.seeds += 1
        result = play(scenario_of(seed), policies)
        if isinstance(result, Failure):
            tally.failures.append(seed)
        else:
            tally.add(result)
    return tally


def play_all(
    first: int, seeds: int, mutation: str | None = None, *, jobs: int | None = None
) -> Iterator[Tally]:
    """Runs the worlds of consecutive seeds, and yields tallies in order of seeds.

    Args:
        first: the first seed.
        seeds: how many.
        mutation: the decision that is taken wrongly, if any.
        jobs: worlds at a time, each in a process of its own; None for one on each core.
    """
    chunks = [
        range(start, min(start + CHUNK, first + seeds))
        for start in range(first, first + seeds, CHUNK)
    ]
    workers = min(jobs or len(os.sched_getaffinity(0)), len(chunks))
    if workers <= 1:
        yield from (play_seeds(chunk, mutation) for chunk in chunks)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(play_seeds, chunks, [mutation] * len(chunks))


def shrink_failure(failure: Failure, policies: Policies | None = None) -> Failure:
    """Returns the failure of a smaller world that breaks the same thing.

    With wrong policies it is a world in which everything holds under the real ones.
    """

    def fails(scenario: Scenario) -> bool:
        result = play(scenario, policies)
        alike = isinstance(result, Failure) and result.what == failure.what
        return alike and (policies is None or isinstance(play(scenario), Outcome))

    smallest = play(shrink(failure.scenario, fails), policies)
    assert isinstance(smallest, Failure)
    return smallest
