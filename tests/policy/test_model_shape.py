# SPDX-License-Identifier: Apache-2.0
"""Model shapes: no parameter is counted twice or forgotten, however the model is spread."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.job.model_shape import Capture, ModelShape, inventory_of
from megatron_moevement.policy.job.operators import OperatorId, OperatorKind
from megatron_moevement.policy.job.ranks import Layout, LogicalRank

LAYOUTS = st.builds(
    Layout,
    pp=st.integers(1, 3),
    dp=st.integers(1, 3),
    cp=st.integers(1, 2),
    ep=st.sampled_from([1, 2, 4]),
)
SHAPE = ModelShape(
    num_layers=3,
    hidden_size=5,
    ffn_hidden_size=7,
    vocab_size=11,
    num_experts=8,
    moe_ffn_hidden_size=3,
    moe_shared_expert_intermediate_size=2,
)
EXPERT = 3 * 5 * 3
GATE = 5 * 8
REST = 4 * 25 + 3 * 5 * 2 + 10
ENDS = 2 * 55 + 5
TOTAL = 3 * (8 * EXPERT + GATE + REST) + ENDS


def total_bytes(inventory):
    full = compute = 0
    for operators in inventory.by_rank.values():
        full += sum(operator.full_bytes for operator in operators)
        compute += sum(operator.compute_bytes for operator in operators)
    return full, compute


@given(LAYOUTS)
def test_shards_add_up_to_the_model(layout):
    assert total_bytes(inventory_of(SHAPE, layout, Capture.SHARD)) == (12 * TOTAL, 2 * TOTAL)


@given(LAYOUTS)
def test_whole_captures_repeat_what_replicas_share(layout):
    full, _ = total_bytes(inventory_of(SHAPE, layout, Capture.WHOLE))
    experts = 3 * 8 * EXPERT * layout.dp * layout.cp
    others = (TOTAL - 3 * 8 * EXPERT) * layout.ranks_per_stage
    assert full == 12 * (experts + others)


@given(LAYOUTS)
def test_an_operator_is_listed_by_all_that_hold_it(layout):
    inventory = inventory_of(SHAPE, layout, Capture.SHARD)
    for operator, holders in inventory.holders.items():
        first = holders[0]
        alike = [each for each in layout.stage_ranks(first.pp) if each.tp == first.tp]
        if operator.kind is OperatorKind.EXPERT:
            part = layout.expert_parallel_rank(first)
            alike = [each for each in alike if layout.expert_parallel_rank(each) == part]
        assert holders == tuple(sorted(alike))


def test_tensor_parallelism_splits_matrices_and_repeats_norms_and_gates():
    inventory = inventory_of(SHAPE, Layout(tp=5), Capture.WHOLE)
    weights = {op.id: op.compute_bytes for op in inventory.by_rank[LogicalRank()]}
    assert weights[OperatorId(OperatorKind.EXPERT, 0, 0)] == 2 * EXPERT // 5
    assert weights[OperatorId(OperatorKind.GATE, 0)] == 2 * GATE
    assert weights[OperatorId(OperatorKind.NON_EXPERT, 0)] == 2 * (26 + 10)


def test_a_dense_model_has_no_experts_and_no_gates():
    shape = ModelShape(2, 4, 8, 16)
    inventory = inventory_of(shape, Layout(), Capture.WHOLE)
    assert [str(op) for op in inventory.sorted_operators] == [
        "layers.0.rest",
        "layers.1.rest",
        "embedding",
        "head",
    ]


@pytest.mark.parametrize(("stages", "copies"), [(1, 1), (2, 2)])
def test_tied_ends_share_their_slot_and_one_stage_has_one_matrix(stages, copies):
    shape = ModelShape(2, 4, 8, 16, tied_embeddings=True)
    inventory = inventory_of(shape, Layout(pp=stages), Capture.WHOLE)
    ends = {OperatorId(OperatorKind.EMBEDDING), OperatorId(OperatorKind.HEAD)}
    assert inventory.tied == (frozenset(ends),)
    weights = [
        op.compute_bytes for ops in inventory.by_rank.values() for op in ops if op.id in ends
    ]
    assert sum(weights) == 2 * (copies * 64 + 4)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ((0, 4, 8, 16), "num_layers"),
        ((2, 4, 0, 16), "ffn_hidden_size"),
        ((2, 4, 8, 16, 4, 0), "moe_ffn_hidden_size"),
        ((2, 4, 8, 16, -1), "num_experts"),
    ],
)
def test_sizes_that_make_no_model_are_refused(sizes, name):
    with pytest.raises(ValueError, match=name):
        ModelShape(*sizes)
