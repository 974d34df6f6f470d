# SPDX-License-Identifier: Apache-2.0
"""What a replay leaves out of the weight gradients, and the order that leaves out most."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_moevement.policy.job.model_shape import Capture, ModelShape, inventory_of
from megatron_moevement.policy.job.operators import Inventory, OperatorId, OperatorKind
from megatron_moevement.policy.job.ranks import Layout
from megatron_moevement.policy.window.ordering import Ordering, order_by_layers, order_operators
from megatron_moevement.policy.window.packing import ORDER_TOLERANCE
from megatron_moevement.policy.window.schedule import WindowSchedule
from megatron_moevement.policy.window.skipping_schedule import ExpertOrder, skip_most
from megatron_moevement.policy.window.weight_gradients import (
    ExpertKernels,
    local_experts,
    skipped_gradients,
)
from megatron_moevement.policy.window.window_planner import plan_window


def inventory_for(layers=4, experts=8, layout=None, capture=Capture.SHARD):
    shape = ModelShape(
        num_layers=layers,
        hidden_size=16,
        ffn_hidden_size=32,
        vocab_size=64,
        num_experts=experts,
        moe_ffn_hidden_size=32 if experts else 0,
        mlp_matrices=2,
        tied_embeddings=False,
    )
    return inventory_of(shape, layout or Layout(pp=2, dp=2, ep=2), capture)


def experts_of(inventory):
    return [one for one in inventory.sorted_operators if one.kind is OperatorKind.EXPERT]


def by_index(inventory, window):
    order = order_operators(inventory.operators, Ordering.INDEX)
    return plan_window(inventory, order, window=window)


INVENTORIES = st.builds(
    inventory_for,
    layers=st.sampled_from([2, 4, 6]),
    experts=st.sampled_from([0, 4, 8]),
    layout=st.sampled_from([Layout(), Layout(ep=2), Layout(pp=2, dp=3, ep=2), Layout(pp=2, ep=4)]),
    capture=st.sampled_from(Capture),
)
KERNELS = st.sampled_from(ExpertKernels)
SEEDS = st.integers(0, 2**32)


def counts_of(inventory, seed):
    draw = random.Random(seed)
    skew = draw.choice([0.05, 0.3, 1.0, 100.0])
    return {expert: round(1000 * draw.gammavariate(skew, 1)) for expert in experts_of(inventory)}


@given(INVENTORIES, st.integers(1, 6), KERNELS, SEEDS)
@settings(max_examples=25, deadline=None)
def test_what_is_left_out_is_what_the_frozen_operators_of_each_step_are(
    inventory, window, kernels, seed
):
    draw = random.Random(seed)
    slots = {one: draw.randrange(window) for one in inventory.sorted_operators}
    tokens = counts_of(inventory, seed)
    skipped = skipped_gradients(WindowSchedule(inventory, window, slots), kernels, tokens)
    weight = {}
    for listed in inventory.distinct.values():
        for one in listed:
            weight[one.id] = weight.get(one.id, 0) + one.full_bytes
    experts = experts_of(inventory)
    work = {one: weight[one] * tokens[one] for one in experts} if experts else weight
    assert skipped.step_work == sum(work.values())
    assert len(skipped.by_step) == window - 1
    for slot, found in enumerate(skipped.by_step):
        frozen = {one for one in work if slots[one] > slot}
        if kernels is ExpertKernels.WHOLE and experts:
            frozen = {one for own in local_experts(inventory) if frozen >= {*own} for one in own}
        assert found == sum(work[one] for one in frozen)


@given(INVENTORIES)
def test_local_experts_are_those_of_a_layer_that_a_rank_holds(inventory):
    found = local_experts(inventory)
    assert sorted(one for own in found for one in own) == experts_of(inventory)
    for listed in inventory.distinct.values():
        held = {one.id for one in listed if one.id.kind is OperatorKind.EXPERT}
        own = [group for group in found if held & {*group}]
        assert held == {one for group in own for one in group}
        assert len({group[0].layer for group in own}) == len(own)


@given(INVENTORIES, SEEDS)
def test_an_order_by_layers_has_every_operator_once_and_local_experts_in_a_row(inventory, seed):
    counts, together = counts_of(inventory, seed), local_experts(inventory)
    order = order_by_layers(inventory.operators, together, counts)
    assert sorted(order) == list(inventory.sorted_operators)
    shuffled = random.Random(seed).sample(together, len(together))
    assert order_by_layers(set(order), shuffled, counts) == order
    starts = sorted((order.index(min(own)), own) for own in together)
    assert all(order[start : start + len(own)] == own for start, own in starts)
    sums = [sum(counts[one] for one in own) for _, own in starts]
    assert sums == sorted(sums)


@given(INVENTORIES, st.integers(1, 6), KERNELS, SEEDS)
@settings(max_examples=25, deadline=None)
def test_the_chosen_order_never_skips_less_than_index_nor_takes_much_larger_slots(
    inventory, window, kernels, seed
):
    tokens, index = counts_of(inventory, seed), by_index(inventory, window)
    chosen = skip_most(index, ExpertOrder(kernels, tokens, tokens))
    assert chosen.size.window == window
    assert chosen.schedule.inventory is inventory
    least = skipped_gradients(index.schedule, kernels, tokens).total
    assert skipped_gradients(chosen.schedule, kernels, tokens).total >= least
    worst = chosen.schedule.worst_slot_bytes
    assert worst <= index.size.worst_slot_bytes * (1 + ORDER_TOLERANCE)
    again = Inventory(dict(reversed(list(inventory.by_rank.items()))), inventory.tied)
    found = skip_most(by_index(again, window), ExpertOrder(kernels, tokens, tokens))
    assert found.schedule.digest == chosen.schedule.digest


def test_popular_experts_are_skipped_longest_one_by_one():
    inventory = inventory_for(layout=Layout(), experts=8, layers=1)
    experts = experts_of(inventory)
    tokens = {expert: 1000 * (expert.expert == 0) + 1 for expert in experts}
    index = by_index(inventory, 4)
    chosen = skip_most(index, ExpertOrder(ExpertKernels.EACH, tokens, tokens)).schedule
    assert index.schedule.slots[experts[0]] == 0
    assert chosen.slots[experts[0]] == max(chosen.slots[expert] for expert in experts)


def test_with_kernels_that_skip_a_layer_at_once_its_local_experts_stay_together():
    inventory = inventory_for(layout=Layout(), experts=4, layers=4)
    tokens = {expert: 1 + 9 * (expert.layer == 0) for expert in experts_of(inventory)}
    chosen = skip_most(by_index(inventory, 4), ExpertOrder(ExpertKernels.WHOLE, tokens, tokens))
    slots = chosen.schedule.slots
    last = {layer: min(slots[one] for one in tokens if one.layer == layer) for layer in range(4)}
    assert last[0] == max(last.values())
    order = order_operators(inventory.operators, Ordering.HARD, tokens)
    scattered = plan_window(inventory, order, window=4).schedule
    assert (
        skipped_gradients(chosen.schedule, ExpertKernels.WHOLE, tokens).total
        >= skipped_gradients(scattered, ExpertKernels.WHOLE, tokens).total
    )


def test_local_experts_share_a_slot_where_they_fit_into_one():
    inventory = inventory_for(layout=Layout(ep=2), experts=8, layers=10)
    index = by_index(inventory, 4)
    slots = index.schedule.slots
    assert any(len({slots[one] for one in own}) > 1 for own in local_experts(inventory))
    slots = skip_most(index, ExpertOrder(ExpertKernels.WHOLE)).schedule.slots
    assert all(len({slots[one] for one in own}) == 1 for own in local_experts(inventory))


@pytest.mark.parametrize("kernels", ExpertKernels)
def test_a_schedule_without_room_is_not_chosen(kernels):
    inventory = inventory_for()
    tokens = counts_of(inventory, 3)
    index = by_index(inventory, 3)
    order = ExpertOrder(kernels, tokens, tokens)
    assert skip_most(index, order).schedule.digest != index.schedule.digest
    assert skip_most(index, order, has_room=lambda schedule: False) is index


def test_dense_layers_are_skipped_from_the_front():
    inventory = inventory_for(experts=0, layout=Layout())
    index = by_index(inventory, 3)
    skipped = skipped_gradients(index.schedule, ExpertKernels.EACH)
    assert skipped.by_step[0] > skipped.by_step[1] > 0
    slots = [index.schedule.slots[OperatorId(OperatorKind.NON_EXPERT, n)] for n in range(4)]
    assert slots == sorted(slots, reverse=True)
