# SPDX-License-Identifier: Apache-2.0
"""Packing: against brute force, against its own bounds, and in the order asked for."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.job.operators import Inventory, Operator, OperatorId, OperatorKind
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.components import split
from megatron_moevement.policy.window.packing import Levelled, lower_bound_bytes, pack
from megatron_moevement.policy.window.schedule import WindowSchedule

EXPERTS = [OperatorId(OperatorKind.EXPERT, 0, number) for number in range(200)]
SIZES = st.one_of(st.integers(1, 10), st.integers(1, 100))


def inventory_of(*ranks, tied=()):
    """Builds an inventory from (FULL, COMPUTE) pairs, or None where a rank lacks the operator."""
    return Inventory(
        {
            LogicalRank(dp=rank): tuple(
                Operator(EXPERTS[number], *pair)
                for number, pair in enumerate(pairs)
                if pair is not None
            )
            for rank, pairs in enumerate(ranks)
        },
        tied,
    )


def schedule_of(inventory, window, levelled=Levelled.FULL_AND_COMPUTE, budget_bytes=None):
    slots = [0] * len(inventory.sorted_operators)
    for part in split(inventory, inventory.sorted_operators):
        packing = pack(part, window, levelled, budget_bytes)
        for group, chosen in zip(part.groups, packing.slots, strict=True):
            for position, slot in zip(group.positions, chosen, strict=True):
                slots[position] = slot
    for tied in inventory.tied_positions:
        for position in tied:
            slots[position] = slots[tied[0]]
    by_operator = dict(zip(inventory.sorted_operators, slots, strict=True))
    return WindowSchedule(inventory, window, by_operator)


def largest_lower_bound(inventory, window):
    parts = split(inventory, inventory.sorted_operators)
    return max(lower_bound_bytes(part, window, Levelled.FULL_AND_COMPUTE) for part in parts)


def best_by_brute_force(inventory, window):
    operators = inventory.sorted_operators
    return min(
        WindowSchedule(inventory, window, dict(zip(operators, slots, strict=True))).worst_slot_bytes
        for slots in itertools.product(range(window), repeat=len(operators))
    )


@st.composite
def arbitrary(draw):
    count = draw(st.integers(1, 5))
    pair = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda p: (max(p), min(p)))
    ranks = draw(
        st.lists(
            st.lists(st.one_of(st.none(), pair), min_size=count, max_size=count),
            min_size=1,
            max_size=3,
        )
    )
    ranks[0] = [pair or (6, 1) for pair in ranks[0]]
    return inventory_of(*ranks)


@st.composite
def stages(draw, max_experts=4):
    """Expert-parallel ranks with experts of their own, and a rest that weighs the same on all."""
    rest = draw(st.lists(SIZES, min_size=1, max_size=2))
    owned = draw(st.lists(st.lists(SIZES, max_size=max_experts), min_size=1, max_size=2))
    count = sum(map(len, owned))
    ranks = []
    first = 0
    for sizes in owned:
        own = [None] * count
        own[first : first + len(sizes)] = [(6 * size, size) for size in sizes]
        first += len(sizes)
        ranks.append(own + [(6 * size, size) for size in rest])
    return inventory_of(*ranks)


@given(arbitrary(), st.integers(1, 3))
def test_no_packing_beats_brute_force_and_none_its_lower_bound(inventory, window):
    best = best_by_brute_force(inventory, window)
    assert largest_lower_bound(inventory, window) <= best
    assert best <= schedule_of(inventory, window).worst_slot_bytes


@given(stages(), st.integers(1, 3))
def test_with_equal_shares_the_worst_slot_is_less_than_twice_the_optimum(inventory, window):
    best = best_by_brute_force(inventory, window)
    assert schedule_of(inventory, window).worst_slot_bytes <= 2 * best


@given(stages(max_experts=40), st.integers(1, 6), st.sampled_from(Levelled))
def test_with_equal_shares_the_bound_is_exceeded_by_one_operator_at_most(
    inventory, window, levelled
):
    largest = max((op.full_bytes for ops in inventory.by_rank.values() for op in ops), default=0)
    schedule = schedule_of(inventory, window, levelled)
    if levelled is Levelled.FULL_AND_COMPUTE:
        measured = schedule.worst_slot_bytes
        bound = largest_lower_bound(inventory, window)
    else:
        full = WindowSchedule(
            Inventory(
                {
                    rank: tuple(Operator(op.id, op.full_bytes, 0) for op in operators)
                    for rank, operators in inventory.by_rank.items()
                }
            ),
            window,
            schedule.slots,
        )
        measured = full.worst_slot_bytes
        bound = largest_lower_bound(full.inventory, window)
    assert measured <= bound + largest + 1  # bounds are rounded to bytes


@given(st.integers(1, 6), st.integers(1, 6))
def test_equal_operators_come_out_as_the_formula_when_full_is_levelled(window, per_slot):
    count = window * per_slot
    schedule = schedule_of(inventory_of([(12, 2)] * count), window, Levelled.FULL)
    sizes = schedule.bytes_by_slot[LogicalRank()]
    assert [size * window for size in sizes] == [
        count * (12 + 2 * (window - slot - 1)) for slot in range(window)
    ]
    assert sum(sizes) == count * 12 // window * window + count * (window - 1)


@given(st.integers(1, 6))
def test_one_equal_operator_for_each_slot_leaves_no_choice(window):
    schedule = schedule_of(inventory_of([(12, 2)] * window), window)
    assert schedule.worst_slot_bytes == 12 + 2 * (window - 1)


@given(st.integers(1, 60), st.integers(1, 5))
def test_levelling_what_slots_weigh_is_never_worse_with_equal_operators(count, window):
    inventory = inventory_of([(12, 2)] * count)
    both = schedule_of(inventory, window).worst_slot_bytes
    assert both <= schedule_of(inventory, window, Levelled.FULL).worst_slot_bytes


@given(st.integers(1, 60), st.integers(1, 5))
def test_operators_alike_keep_their_order(count, window):
    slots = schedule_of(inventory_of([(12, 2)] * count), window).slots
    in_order = [slots[EXPERTS[number]] for number in range(count)]
    assert in_order == sorted(in_order)


def test_the_order_gives_way_when_keeping_it_costs_more_than_the_tolerance():
    sizes = [(50, 0), (40, 0), (60, 0), (50, 0)]
    schedule = schedule_of(inventory_of(sizes), 2)
    assert schedule.worst_slot_bytes == 100
    assert schedule.slots[EXPERTS[0]] == schedule.slots[EXPERTS[3]]


def test_the_order_stays_when_breaking_it_gains_less_than_the_tolerance():
    sizes = [(30, 0), (70, 0), (73, 0), (31, 0)]  # ordered 104, best 103
    slots = schedule_of(inventory_of(sizes), 2).slots
    assert [slots[EXPERTS[number]] for number in range(4)] == [0, 0, 1, 1]


@given(st.lists(st.sampled_from([(60, 10), (50, 5), (6, 1)]), min_size=1), st.integers(1, 5))
def test_operators_alike_keep_their_order_even_when_the_packing_breaks_it(pairs, window):
    slots = schedule_of(inventory_of(pairs), window).slots
    for alike in set(pairs):
        in_order = [slots[EXPERTS[n]] for n, pair in enumerate(pairs) if pair == alike]
        assert in_order == sorted(in_order)


def test_the_heaviest_of_the_ranks_that_share_operators_bounds_their_slots():
    heavy = [(30, 0), (70, 0), (73, 0), (31, 0)]
    schedule = schedule_of(inventory_of(heavy, [(1, 0)] * 4), 2)
    assert [schedule.slots[EXPERTS[number]] for number in range(4)] == [0, 0, 1, 1]


def test_the_order_gives_way_to_a_budget_that_only_another_packing_keeps():
    sizes = [(30, 0), (70, 0), (73, 0), (31, 0)]
    schedule = schedule_of(inventory_of(sizes), 2, budget_bytes=103)
    assert schedule.worst_slot_bytes <= 103


def test_later_slots_take_more_because_they_hold_less_compute():
    schedule = schedule_of(inventory_of([(12, 2)] * 44), 2)
    assert [len(schedule.full[slot]) for slot in range(2)] == [20, 24]
    assert schedule.worst_slot_bytes == 12 * 24


def test_an_operator_has_one_slot_whatever_its_shards_weigh():
    inventory = inventory_of([(12, 2), (0, 0), (6, 1)], [(0, 0), (12, 2), (6, 1)])
    schedule = schedule_of(inventory, 2)
    assert schedule.slots.keys() == set(EXPERTS[:3])
    assert schedule.worst_slot_bytes == best_by_brute_force(inventory, 2)


def test_tied_operators_are_packed_as_one():
    tied = (frozenset({EXPERTS[0], EXPERTS[3]}),)
    pairs = [(12, 2)] * 2 + [None] * 2, [None] * 2 + [(12, 2)] * 2
    schedule = schedule_of(inventory_of(*pairs, tied=tied), 2)
    assert schedule.slots[EXPERTS[0]] == schedule.slots[EXPERTS[3]]
    assert schedule.slots[EXPERTS[1]] == schedule.slots[EXPERTS[2]] != schedule.slots[EXPERTS[0]]


def test_tied_operators_stand_where_the_last_of_them_does():
    tied = (frozenset({EXPERTS[0], EXPERTS[3]}),)
    slots = schedule_of(inventory_of([(12, 2)] * 4, tied=tied), 2, Levelled.FULL).slots
    assert [slots[EXPERTS[number]] for number in range(4)] == [1, 0, 0, 1]


def test_tied_operators_on_one_rank_add_up():
    tied = (frozenset({EXPERTS[0], EXPERTS[1]}),)
    parts = split(inventory_of([(12, 2), (6, 1), (3, 1)], tied=tied), tuple(EXPERTS[:3]))
    (column,) = parts[0].groups[0].columns
    assert (column.full, column.compute) == ([18, 3], [3, 1])


def test_ranks_without_common_operators_are_independent():
    parts = split(
        inventory_of([(12, 2), None, None], [None, (12, 2), (6, 1)], [None, None, (6, 1)]),
        tuple(EXPERTS[:3]),
    )
    assert sorted(len(part.columns_by_rank) for part in parts) == [1, 2]


def test_operators_that_weigh_nothing_have_a_slot_too():
    schedule = schedule_of(inventory_of([(0, 0), (0, 0)]), 3)
    assert schedule.worst_slot_bytes == 0
    assert schedule.slots.keys() == set(EXPERTS[:2])


@pytest.mark.parametrize("order", [EXPERTS[:1], EXPERTS[:3], [EXPERTS[0]] * 2, EXPERTS[1:3]])
def test_an_order_must_name_each_operator_once(order):
    with pytest.raises(ValueError, match="order"):
        split(inventory_of([(12, 2), (12, 2)]), order)
