# SPDX-License-Identifier: Apache-2.0
"""Operators: their names, their order, and inventories that hold together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.job.operators import Inventory, Operator, OperatorId, OperatorKind
from megatron_moevement.policy.job.ranks import LogicalRank

LAYERS = st.integers(0, 2**30 - 1)
IDS = st.one_of(
    st.builds(OperatorId, st.just(OperatorKind.EXPERT), LAYERS, st.integers(0, 2**30 - 1)),
    st.builds(OperatorId, st.sampled_from([OperatorKind.GATE, OperatorKind.NON_EXPERT]), LAYERS),
    st.builds(OperatorId, st.sampled_from([OperatorKind.EMBEDDING, OperatorKind.HEAD])),
)


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        (OperatorId(OperatorKind.EXPERT, 3, 17), "layers.3.experts.17"),
        (OperatorId(OperatorKind.GATE, 3), "layers.3.gate"),
        (OperatorId(OperatorKind.NON_EXPERT, 3), "layers.3.rest"),
        (OperatorId(OperatorKind.EMBEDDING), "embedding"),
        (OperatorId(OperatorKind.HEAD), "head"),
    ],
)
def test_names_are_stable(operator, name):
    assert str(operator) == name


@given(IDS)
def test_a_name_gives_its_operator_back(operator):
    assert OperatorId.parse(str(operator)) == operator


@given(IDS, IDS)
def test_identity_and_order_are_those_of_kind_layer_and_expert(one, other):
    def key(operator):
        return (operator.kind, operator.layer or 0, operator.expert or 0)

    assert (one == other) == (key(one) == key(other))
    assert (one < other) == (key(one) < key(other))
    assert one != other or hash(one) == hash(other)


@pytest.mark.parametrize(
    "name", ["", "layers.1", "layers.x.gate", "layers.1.experts", "layers.1.gate.2", "Head"]
)
def test_a_name_of_nothing_is_refused(name):
    with pytest.raises(ValueError, match="names no operator"):
        OperatorId.parse(name)


@pytest.mark.parametrize(
    "parts",
    [
        (OperatorKind.EXPERT, 1),
        (OperatorKind.EXPERT,),
        (OperatorKind.GATE,),
        (OperatorKind.GATE, 1, 2),
        (OperatorKind.HEAD, 1),
        (OperatorKind.GATE, -1),
        (OperatorKind.EXPERT, 0, -1),
        (OperatorKind.EXPERT, 0, 2**30),
    ],
)
def test_kind_and_numbers_must_fit(parts):
    with pytest.raises(ValueError, match=r"layer|expert"):
        OperatorId(*parts)


GATE = OperatorId(OperatorKind.GATE, 0)
HEAD = OperatorId(OperatorKind.HEAD)


def test_sizes_are_not_negative():
    with pytest.raises(ValueError, match="negative"):
        Operator(GATE, 12, -2)


@pytest.mark.parametrize("by_rank", [{}, {LogicalRank(): ()}])
def test_an_inventory_needs_a_rank_and_an_operator(by_rank):
    with pytest.raises(ValueError, match="at least one"):
        Inventory(by_rank)


def test_a_rank_lists_an_operator_once():
    with pytest.raises(ValueError, match="twice"):
        Inventory({LogicalRank(): (Operator(GATE, 12, 2), Operator(GATE, 12, 2))})


def test_tied_operators_must_be_held():
    with pytest.raises(ValueError, match="tied head"):
        Inventory({LogicalRank(): (Operator(GATE, 12, 2),)}, (frozenset({GATE, HEAD}),))


def test_holders_include_ranks_with_an_empty_shard():
    inventory = Inventory(
        {
            LogicalRank(dp=1): (Operator(GATE, 0, 0), Operator(HEAD, 12, 2)),
            LogicalRank(dp=0): (Operator(GATE, 12, 2),),
        }
    )
    assert inventory.holders[GATE] == (LogicalRank(dp=0), LogicalRank(dp=1))
    assert inventory.holders[HEAD] == (LogicalRank(dp=1),)
    assert inventory.sorted_operators == (GATE, HEAD)
    assert inventory.operators == {GATE, HEAD}
