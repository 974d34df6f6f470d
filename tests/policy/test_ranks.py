# SPDX-License-Identifier: Apache-2.0
"""Logical ranks and layouts: numbering, stages, and who holds the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.job.ranks import Layout, LogicalRank

SIZES = st.integers(1, 3)
LAYOUTS = st.builds(Layout, SIZES, SIZES, SIZES, SIZES, SIZES, SIZES)


@given(LAYOUTS)
def test_numbers_and_positions_are_each_others_inverse(layout):
    numbers = [
        (((rank.pp * layout.dp + rank.dp) * layout.ep + rank.ep) * layout.cp + rank.cp) * layout.tp
        + rank.tp
        for rank in layout.ranks
    ]
    assert numbers == list(range(layout.num_ranks))
    assert len(set(layout.ranks)) == layout.num_ranks


@given(LAYOUTS)
def test_a_name_gives_its_rank_back(layout):
    assert [LogicalRank.parse(str(rank)) for rank in layout.ranks] == list(layout.ranks)


@given(LAYOUTS, st.builds(LogicalRank, *[st.integers(-1, 3)] * 5))
def test_a_layout_has_its_ranks_and_no_others(layout, rank):
    assert (rank in layout) == (rank in layout.ranks)


def test_a_name_of_nothing_is_refused():
    with pytest.raises(ValueError, match="names no logical rank"):
        LogicalRank.parse("pp0.dp0")


@given(LAYOUTS)
def test_stages_split_the_job(layout):
    stages = [layout.stage_ranks(stage) for stage in range(layout.pp)]
    assert [rank for stage in stages for rank in stage] == list(layout.ranks)
    assert all(rank.pp == stage for stage, ranks in enumerate(stages) for rank in ranks)


@given(LAYOUTS)
def test_every_expert_of_a_stage_has_as_many_replicas(layout):
    num_experts = 2 * layout.ep
    for rank in layout.stage_ranks(0):
        held = layout.experts_of(rank, num_experts)
        stage = [other for other in layout.stage_ranks(0) if other.tp == rank.tp]
        replicas = [other for other in stage if layout.experts_of(other, num_experts) == held]
        assert len(replicas) == layout.dp * layout.cp
    experts = {e for rank in layout.stage_ranks(0) for e in layout.experts_of(rank, num_experts)}
    assert experts == set(range(num_experts))


@given(LAYOUTS, st.integers(0, 40))
def test_every_layer_lies_on_one_stage(layout, num_layers):
    layers = [list(layout.layers_of(stage, num_layers)) for stage in range(layout.pp)]
    assert sorted(layer for stage in layers for layer in stage) == list(range(num_layers))
    assert all(stage == sorted(stage) for stage in layers)


def test_interleaved_chunks_go_round_the_stages():
    layout = Layout(pp=2, chunks=2)
    assert list(layout.layers_of(0, 8)) == [0, 1, 4, 5]
    assert list(layout.layers_of(1, 8)) == [2, 3, 6, 7]


def test_ranks_are_numbered_as_megatron_does():
    layout = Layout(pp=3, dp=2, ep=2)
    assert layout.rank_at(0) == LogicalRank()
    assert layout.rank_at(1) == LogicalRank(ep=1)
    assert layout.rank_at(2) == LogicalRank(dp=1)
    assert layout.rank_at(4) == LogicalRank(pp=1)
    assert layout.rank_at(11) == LogicalRank(pp=2, dp=1, ep=1)


def test_with_context_parallelism_experts_follow_the_folded_rank():
    layout = Layout(cp=2, ep=2)
    parts = [layout.expert_parallel_rank(layout.rank_at(number)) for number in range(4)]
    assert parts == [0, 1, 0, 1]


@pytest.mark.parametrize("number", [-1, 4])
def test_a_rank_outside_of_the_job_is_refused(number):
    with pytest.raises(ValueError, match="outside of a job of 4"):
        Layout(dp=4).rank_at(number)


def test_experts_must_be_spread_evenly():
    with pytest.raises(ValueError, match="5 experts"):
        Layout(ep=2).experts_of(LogicalRank(), 5)


def test_sizes_are_at_least_one():
    with pytest.raises(ValueError, match="ep is 0"):
        Layout(ep=0)
