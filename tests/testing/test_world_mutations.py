# SPDX-License-Identifier: Apache-2.0
"""Wrong decisions: the simulator notices each, tells what happened, and keeps a small world."""

import dataclasses
import re
from pathlib import Path

import pytest

from megatron_moevement.testing.campaign import Failure, play, shrink_failure
from megatron_moevement.testing.mutations import MUTATIONS, OF_THE_MODEL, mutation_named
from megatron_moevement.testing.regression import Regression
from megatron_moevement.testing.world.policies import Policies
from megatron_moevement.testing.world.scenario import scenario_of
from megatron_moevement.testing.world.world import Outcome

REGRESSIONS = sorted(Path(__file__).with_name("regressions").glob("*.json"))
TELLING = (0, 1, 2, 4, 6, 7, 8, 11, 12, 13, 14, 25, 27, 35, 38, 44, 46, 58, 80, 110, 156, 225, 347)
"""Seeds of which at least one notices each mutation: `scripts/mutations.sh` tells them."""

FORMER = {
    "flushed-without-a-rank": Policies(share_of_flushed=lambda flushed, rank, ranks: ()),
}
"""Decisions as they once were, each with the kept world that it fails in."""

NAMES = [mutation.name for mutation in MUTATIONS]


def first_failure(name, seeds=TELLING):
    """Returns what the first of some seeds that notices a mutation says."""
    policies = mutation_named(name).policies
    results = (play(scenario_of(seed), policies) for seed in seeds)
    return next((each for each in results if isinstance(each, Failure)), None)


def sizes(scenario):
    """Returns everything about a world that shrinking may make smaller."""
    layout = scenario.layout
    return {
        "pp": layout.pp,
        "ranks": layout.num_ranks,
        "chunks": layout.chunks,
        "micro-batches": scenario.micro_batches,
        "window": scenario.window,
        "steps": scenario.steps,
        "spares": scenario.spares,
        "replicas": scenario.replicas,
        "faults": len(scenario.faults),
        "last tick": max((fault.tick for fault in scenario.faults), default=0),
        "overflows": len(scenario.overflows),
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_decision_is_one_that_production_takes(name):
    """Every public name of the policy has a use there: `tests/engineering/test_decisions.py`."""
    wrong, right = mutation_named(name).policies, Policies()
    fields = [field.name for field in dataclasses.fields(Policies)]
    exchanged = [
        getattr(right, one) for one in fields if getattr(wrong, one) != getattr(right, one)
    ]
    assert exchanged
    of_policy = [
        getattr(each, "__module__", "").startswith("megatron_moevement.policy.")
        for each in exchanged
    ]
    assert all(of_policy) is (name not in OF_THE_MODEL)


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_decision_is_noticed(name):
    assert isinstance(first_failure(name), Failure)


@pytest.mark.parametrize("seed", TELLING)
def test_the_real_decisions_keep_the_same_worlds_whole(seed):
    assert isinstance(play(scenario_of(seed)), Outcome)


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.stem)
def test_a_kept_world_fails_under_the_wrong_decision_and_holds_under_the_real_one(path):
    kept = Regression.from_json(path.read_text(encoding="utf-8"))
    assert isinstance(play(kept.scenario), Outcome)
    if kept.mutation is not None:
        failure = play(kept.scenario, mutation_named(kept.mutation).policies)
        assert isinstance(failure, Failure)
        assert failure.what == kept.violates


@pytest.mark.parametrize("name", FORMER)
def test_a_kept_world_fails_under_the_decision_as_it_once_was(name):
    path = Path(__file__).with_name("regressions") / f"{name}.json"
    kept = Regression.from_json(path.read_text(encoding="utf-8"))
    failure = play(kept.scenario, FORMER[name])
    assert isinstance(failure, Failure)
    assert failure.what == kept.violates


def test_a_world_is_kept_of_every_wrong_decision():
    kept = [Regression.from_json(path.read_text(encoding="utf-8")) for path in REGRESSIONS]
    assert {each.mutation for each in kept} >= set(NAMES)


@pytest.mark.parametrize(
    ("name", "seed"),
    # The first seed that notices it has a large world, which takes ten times as long.
    [("roll-forward-skipped", 38), ("target-is-minimum", None), ("eras-mixed", None)],
)
def test_shrinking_makes_a_world_smaller_that_fails_alike(name, seed):
    policies = mutation_named(name).policies
    failure = first_failure(name, TELLING if seed is None else [seed])
    smallest = shrink_failure(failure, policies)
    assert smallest.what == failure.what
    before, after = sizes(failure.scenario), sizes(smallest.scenario)
    assert all(after[what] <= before[what] for what in before)
    assert after != before
    again = play(smallest.scenario, policies)
    assert again == smallest
    assert isinstance(play(smallest.scenario), Outcome)


def test_shrinking_finds_nothing_to_leave_out_of_what_it_returned():
    failure = first_failure("target-is-minimum")
    policies = mutation_named("target-is-minimum").policies
    smallest = shrink_failure(failure, policies)
    assert shrink_failure(smallest, policies) == smallest


def test_a_story_says_who_did_what_and_when():
    failure = play(scenario_of(129), mutation_named("roll-forward-skipped").policies)
    lines = failure.story.splitlines()
    moments = []
    for line in lines:
        told = re.fullmatch(r" *(\d+\.\d\d)  tick +(\d+)  generation (\d+)  (.+)", line)
        assert told, line
        moments.append((float(told[1]), int(told[2]), int(told[3])))
    assert moments == sorted(moments)
    whole = failure.story
    assert "processes are launched: PP3 x DP2 x EP1" in lines[0]
    for fault in failure.scenario.faults[:1]:
        assert re.search(rf"FAULT {fault.kind.value} at p\d+\(", whole)
    assert re.search(r"p\d+\(pp\d\.dp\d\.ep\d\) dies, training", whole)
    assert re.search(r"p\d+\(pp\d\.dp\d\.ep\d\) takes the rank", whole)
    assert re.search(r"LOCALIZED to step \d+: stage \d lost state", whole)
    assert re.search(rf"VIOLATED {failure.what}: p\d+\(pp\d\.dp\d\.ep\d\) ", lines[-1])
    assert failure.detail in lines[-1].replace("VIOLATED ", "")
