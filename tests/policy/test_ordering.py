# SPDX-License-Identifier: Apache-2.0
"""Ordering of operators."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.job.operators import OperatorId, OperatorKind
from megatron_moevement.policy.window.ordering import Ordering, order_operators

EXPERTS = [OperatorId(OperatorKind.EXPERT, layer, n) for layer in range(2) for n in range(4)]
GATES = [OperatorId(OperatorKind.GATE, layer) for layer in range(2)]
REST = [OperatorId(OperatorKind.NON_EXPERT, layer) for layer in range(2)]
ENDS = [OperatorId(OperatorKind.EMBEDDING), OperatorId(OperatorKind.HEAD)]
MODEL = [*EXPERTS, *GATES, *REST, *ENDS]
COUNTS = st.fixed_dictionaries({expert: st.integers(0, 5) for expert in EXPERTS})
BY_POPULARITY = [Ordering.HARD, Ordering.SOFT, Ordering.DECAYED]


@given(st.permutations(MODEL))
def test_by_index_experts_come_first_then_gates_then_the_rest(operators):
    assert order_operators(operators, Ordering.INDEX) == tuple(MODEL)


@given(st.permutations(MODEL), COUNTS, st.sampled_from(BY_POPULARITY))
def test_experts_are_ordered_by_ascending_popularity_and_ties_by_index(operators, counts, ordering):
    ordered = order_operators(operators, ordering, counts)
    assert ordered[len(EXPERTS) :] == tuple(MODEL[len(EXPERTS) :])
    assert list(ordered[: len(EXPERTS)]) == sorted(EXPERTS, key=lambda e: (counts[e], e))


def test_experts_without_a_count_were_never_activated():
    ordered = order_operators(EXPERTS[:3], Ordering.HARD, {EXPERTS[0]: 1.0})
    assert ordered == (EXPERTS[1], EXPERTS[2], EXPERTS[0])


def test_index_ignores_popularity():
    assert order_operators(EXPERTS, Ordering.INDEX, {EXPERTS[0]: 9}) == tuple(EXPERTS)


@given(COUNTS, st.fixed_dictionaries({expert: st.integers(1, 4) for expert in EXPERTS}))
def test_with_capacities_the_least_used_experts_come_first(counts, capacities):
    ordered = order_operators(EXPERTS, Ordering.CAPACITY, counts, capacities)
    used = [counts[expert] / capacities[expert] for expert in ordered]
    assert used == sorted(used)


@pytest.mark.parametrize("capacities", [None, {EXPERTS[0]: 0.0}])
def test_every_expert_needs_a_capacity(capacities):
    with pytest.raises(ValueError, match="positive capacity"):
        order_operators(EXPERTS[:1], Ordering.CAPACITY, {}, capacities)


@pytest.mark.parametrize("ordering", list(Ordering))
def test_dense_layers_go_from_back_to_front(ordering):
    ordered = order_operators([*REST, *ENDS], ordering)
    assert [str(operator) for operator in ordered] == [
        "head",
        "layers.1.rest",
        "layers.0.rest",
        "embedding",
    ]
