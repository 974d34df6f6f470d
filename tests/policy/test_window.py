# SPDX-License-Identifier: Apache-2.0
"""Windows: the smallest W that hides every slot, one for the whole job."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.job.model_shape import Capture, ModelShape, inventory_of
from megatron_moevement.policy.job.operators import Inventory, Operator, OperatorId, OperatorKind
from megatron_moevement.policy.job.ranks import Layout, LogicalRank
from megatron_moevement.policy.window.ordering import Ordering, order_operators
from megatron_moevement.policy.window.packing import Levelled
from megatron_moevement.policy.window.window_planner import MAX_WINDOW, plan_window

EXPERTS = [OperatorId(OperatorKind.EXPERT, 0, number) for number in range(200)]


def equal_experts(count, rank=0):
    return {
        LogicalRank(pp=rank): tuple(
            Operator(OperatorId(OperatorKind.EXPERT, rank, number), 12, 2)
            for number in range(count)
        )
    }


def plan(inventory, **limits):
    order = order_operators(inventory.operators, Ordering.INDEX)
    return plan_window(inventory, order, **limits)


@st.composite
def shapes(draw):
    layout = Layout(
        pp=draw(st.integers(1, 3)), dp=draw(st.integers(1, 2)), ep=draw(st.sampled_from([1, 2]))
    )
    shape = ModelShape(
        num_layers=draw(st.integers(layout.pp, 5)),
        hidden_size=draw(st.integers(1, 8)),
        ffn_hidden_size=draw(st.integers(1, 8)),
        vocab_size=draw(st.integers(1, 30)),
        num_experts=draw(st.sampled_from([0, 2, 4, 8])),
        moe_ffn_hidden_size=draw(st.integers(1, 8)),
        tied_embeddings=draw(st.booleans()),
    )
    return inventory_of(shape, layout, draw(st.sampled_from(Capture)))


@given(shapes(), st.integers(1, 8), st.sampled_from(Levelled))
def test_a_smaller_window_would_break_the_budget(inventory, divisor, levelled):
    whole = plan(inventory, window=1, levelled=levelled).size.worst_slot_bytes
    chosen = plan(inventory, budget_bytes=whole // divisor, levelled=levelled)
    assert chosen.size.worst_slot_bytes == chosen.schedule.worst_slot_bytes
    assert chosen.size.lower_bound_bytes <= chosen.size.worst_slot_bytes
    if chosen.size.fits:
        for window in range(1, chosen.size.window):
            shorter = plan(inventory, window=window, levelled=levelled)
            assert shorter.size.worst_slot_bytes > chosen.size.budget_bytes


@given(shapes(), st.integers(1, 4))
def test_every_plan_is_a_valid_schedule_and_the_same_every_time(inventory, window):
    one = plan(inventory, window=window)
    other = plan(
        Inventory(dict(reversed(inventory.by_rank.items())), inventory.tied),
        window=window,
    )
    assert one.schedule.digest == other.schedule.digest


@pytest.mark.parametrize("window", [1, 2, 3, 4, 6])
def test_equal_operators_need_the_window_that_the_formula_gives(window):
    count = 60
    price = count * (12 + 2 * (window - 1)) // window  # slot 0, the worst
    inventory = Inventory(equal_experts(count))
    fitting = plan(inventory, budget_bytes=price, levelled=Levelled.FULL)
    assert (fitting.size.window, fitting.size.worst_slot_bytes) == (window, price)
    if window > 1:
        tight = plan(inventory, budget_bytes=price - 1, levelled=Levelled.FULL)
        assert tight.size.window > window


@pytest.mark.parametrize("counts", [(3, 12), (12, 3)])
def test_the_worst_component_decides_for_the_whole_job(counts):
    inventory = Inventory(equal_experts(counts[0]) | equal_experts(counts[1], rank=1))
    alone = plan(Inventory(equal_experts(12)), budget_bytes=60)
    together = plan(inventory, budget_bytes=60)
    assert together.size == alone.size
    assert together.size.window > plan(Inventory(equal_experts(3)), budget_bytes=60).size.window


def test_the_worst_rank_decides_not_the_mean():
    light = tuple(Operator(expert, 0, 0) for expert in EXPERTS[:8])
    heavy = tuple(Operator(expert, 12, 2) for expert in EXPERTS[:8])
    inventory = Inventory({LogicalRank(dp=0): light, LogicalRank(dp=1): heavy})
    assert (
        plan(inventory, budget_bytes=56).size
        == plan(Inventory({LogicalRank(): heavy}), budget_bytes=56).size
    )


@pytest.mark.parametrize("ep", [1, 2])
def test_unpopular_experts_come_early_and_the_rest_last(ep):
    shape = ModelShape(2, 4, 4, 8, num_experts=8, moe_ffn_hidden_size=64)
    inventory = inventory_of(shape, Layout(ep=ep), Capture.WHOLE)
    experts = [op for op in inventory.sorted_operators if op.expert is not None]
    popularity = {expert: -index for index, expert in enumerate(experts)}
    order = order_operators(inventory.operators, Ordering.HARD, popularity)
    slots = plan_window(inventory, order, window=4).schedule.slots
    for operators in inventory.by_rank.values():
        held = {operator.id for operator in operators}
        by_popularity = [slots[expert] for expert in reversed(experts) if expert in held]
        assert by_popularity == sorted(by_popularity)
        assert set(by_popularity) == {0, 1, 2, 3}
    assert {slots[op] for op in inventory.operators if op.expert is None} == {3}


def test_when_nothing_fits_the_window_still_ends_and_says_so():
    inventory = Inventory(equal_experts(200))
    chosen = plan(inventory, budget_bytes=1)
    longest = plan(inventory, window=MAX_WINDOW)
    assert not chosen.size.fits
    assert chosen.size.window < MAX_WINDOW
    assert chosen.size.worst_slot_bytes <= longest.size.worst_slot_bytes * 1.05


@pytest.mark.parametrize("limits", [{}, {"window": 2, "budget_bytes": 9}, {"window": 0}])
def test_give_either_a_budget_or_a_window(limits):
    with pytest.raises(ValueError, match=r"either|at least one"):
        plan(Inventory(equal_experts(1)), **limits)
