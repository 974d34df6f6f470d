# SPDX-License-Identifier: Apache-2.0
"""Scenarios and regressions are read back from JSON as they were written."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.testing.mutations import MUTATIONS
from megatron_moevement.testing.regression import Regression
from megatron_moevement.testing.world.faults import FaultKind
from megatron_moevement.testing.world.scenario import Links, Scenario, scenario_of


@given(st.integers(0, 1 << 40), st.none() | st.sampled_from([each.name for each in MUTATIONS]))
def test_what_is_written_is_read_back(seed, mutation):
    kept = Regression(mutation, "6 same bits", scenario_of(seed))
    assert Regression.from_json(kept.to_json()) == kept
    assert Regression.from_json(kept.to_json()).to_json() == kept.to_json()


def test_every_field_is_written():
    document = json.loads(json.dumps(scenario_of(0).to_document()))
    assert set(document) == {field.name for field in dataclasses.fields(Scenario)}
    assert Scenario.of_document(document) == scenario_of(0)


def test_a_field_that_is_unknown_is_refused():
    with pytest.raises(TypeError, match="weather"):
        Scenario.of_document(scenario_of(0).to_document() | {"weather": "fine"})


def test_seeds_draw_every_kind_of_fault_and_link():
    scenarios = [scenario_of(seed) for seed in range(300)]
    assert {each.links for each in scenarios} == set(Links)
    assert {fault.kind for each in scenarios for fault in each.faults} == set(FaultKind)


def test_a_seed_draws_the_same_world_every_time():
    assert scenario_of(17) == scenario_of(17)
    assert len({scenario_of(seed).to_document().__repr__() for seed in range(100)}) == 100
