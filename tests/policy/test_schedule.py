# SPDX-License-Identifier: Apache-2.0
"""Window schedules: FULL once, COMPUTE until then, the same slot on all replicas."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.job.operators import Inventory, Operator, OperatorId, OperatorKind
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import (
    InvalidScheduleError,
    Window,
    WindowSchedule,
    room_of,
    slot_bytes,
)
from megatron_moevement.policy.window.slot_room import RankRoom, SlotRoom

EXPERTS = [OperatorId(OperatorKind.EXPERT, 0, number) for number in range(6)]


def inventory_of_experts(count, ranks=1, tied=()):
    parts = tuple(Operator(EXPERTS[number], 12, 2) for number in range(count))
    return Inventory({LogicalRank(dp=rank): parts for rank in range(ranks)}, tied)


@st.composite
def schedules(draw, count=None, window=None):
    count = count or draw(st.integers(1, 6))
    window = window or draw(st.integers(1, 4))
    slots = {EXPERTS[number]: draw(st.integers(0, window - 1)) for number in range(count)}
    return WindowSchedule(inventory_of_experts(count, 2), window, slots)


@given(schedules())
def test_every_operator_is_full_once_and_compute_before(schedule):
    for operator in schedule.inventory.operators:
        full = [slot for slot in range(schedule.window) if operator in schedule.full[slot]]
        compute = [slot for slot in range(schedule.window) if operator in schedule.compute[slot]]
        assert full == [schedule.slots[operator]]
        assert compute == list(range(full[0]))


@given(schedules())
def test_bytes_of_a_slot_are_those_of_its_full_and_compute_operators(schedule):
    for operators, slots in zip(
        schedule.inventory.by_rank.values(), schedule.bytes_by_slot.values(), strict=True
    ):
        for slot in range(schedule.window):
            full = [op.full_bytes for op in operators if op.id in schedule.full[slot]]
            compute = [op.compute_bytes for op in operators if op.id in schedule.compute[slot]]
            assert slots[slot] == sum(full) + sum(compute)
    assert schedule.worst_slot_bytes == max(map(max, schedule.bytes_by_slot.values()))


@pytest.mark.parametrize("slots", [{}, {0: 0}, {0: 0, 1: 0, 2: 0}])
def test_an_operator_that_is_never_full_or_unknown_is_refused(slots):
    with pytest.raises(InvalidScheduleError, match="only one of"):
        WindowSchedule(inventory_of_experts(2), 2, {EXPERTS[n]: slot for n, slot in slots.items()})


@pytest.mark.parametrize("slot", [-1, 2])
def test_a_slot_outside_of_the_window_is_refused(slot):
    with pytest.raises(InvalidScheduleError, match=f"FULL in slot {slot} of a window of 2"):
        WindowSchedule(inventory_of_experts(2), 2, {EXPERTS[0]: 0, EXPERTS[1]: slot})


def test_a_window_without_slots_is_refused():
    with pytest.raises(InvalidScheduleError, match="at least one slot"):
        WindowSchedule(inventory_of_experts(1), 0, {EXPERTS[0]: 0})


def test_tied_operators_must_share_their_slot():
    inventory = inventory_of_experts(3, tied=(frozenset(EXPERTS[:2]),))
    WindowSchedule(inventory, 2, {EXPERTS[0]: 1, EXPERTS[1]: 1, EXPERTS[2]: 0})
    with pytest.raises(InvalidScheduleError, match="tied operators need one slot"):
        WindowSchedule(inventory, 2, {EXPERTS[0]: 1, EXPERTS[1]: 0, EXPERTS[2]: 0})


@given(schedules())
def test_the_digest_is_a_function_of_what_ranks_must_agree_on(schedule):
    backwards = dict(reversed(schedule.slots.items()))
    assert dataclasses.replace(schedule, slots=backwards).digest == schedule.digest
    longer = dataclasses.replace(schedule, window=schedule.window + 1)
    assert longer.digest != schedule.digest
    if schedule.window > 1:
        operator = EXPERTS[0]
        moved = {**schedule.slots, operator: (schedule.slots[operator] + 1) % schedule.window}
        assert dataclasses.replace(schedule, slots=moved).digest != schedule.digest


def test_equal_operators_cost_what_the_formula_says():
    window = 4
    parts = [(number % window, 12, 2) for number in range(20)]
    sizes = slot_bytes(parts, window)
    parameters = 20
    assert [size * window for size in sizes] == [
        parameters * (12 + 2 * (window - slot - 1)) for slot in range(window)
    ]


def test_windows_are_ordered_by_their_start():
    assert sorted([Window(6, 2), Window(3, 3), Window(0, 3)])[0].start == 0
    assert Window(3, 3).last == 5


@given(schedules())
def test_room_for_one_schedule_is_what_the_largest_slots_of_each_rank_take(schedule):
    room = room_of([schedule])
    assert schedule.fits_into(room)
    for rank, slots in schedule.bytes_by_slot.items():
        assert room[rank].by_used == {schedule.window: (max(slots), max(slots) * schedule.window)}
        assert room[rank].slot_bytes == max(slots)
        assert SlotRoom(max(slots), sum(slots)).holds(slots)
        assert not SlotRoom(max(slots) - 1, sum(slots)).holds(slots)
        assert not SlotRoom(max(slots), sum(slots) - 1).holds(slots)


@given(st.tuples(*(schedules(5, window) for window in (3, 1, 4, 2))))
def test_room_for_several_w_is_of_each_of_them(alike):
    room = room_of(alike)
    assert all(each.fits_into(room) for each in alike)
    for rank, own in room.items():
        largest = {each.window: max(each.bytes_by_slot[rank]) for each in alike}
        for window, found in own.by_used.items():
            size = max(size for each, size in largest.items() if each >= window)
            larger = math.ceil(size * 1.05) if window > 1 else size
            assert found == (larger, window * size)
        assert RankRoom.of_document(own.document()) == own
        assert own.of(0) == own.by_used[1]
        assert own.of(5) is None
        assert own.beside(3, 4).of(2) == (own.of(2).slot_bytes + 3, own.of(2).window_bytes + 12)
