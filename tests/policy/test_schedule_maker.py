# SPDX-License-Identifier: Apache-2.0
"""The next schedule follows from the worst rank's measurements, and from what all have counted."""

import dataclasses

import pytest

from megatron_moevement.policy.job.operators import Inventory, Operator, OperatorId, OperatorKind
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.watching.measurements import NOT_MEASURED, Measured
from megatron_moevement.policy.watching.schedule_maker import (
    Noted,
    ScheduleMaker,
    noted,
    room_for_windows,
)
from megatron_moevement.policy.window.ordering import Ordering
from megatron_moevement.policy.window.popularity import Popularity
from megatron_moevement.policy.window.skipping_schedule import schedule_of
from megatron_moevement.policy.window.slot_room import RankRoom, SlotRoom
from megatron_moevement.policy.window.timetable import Timetable
from megatron_moevement.policy.window.weight_gradients import ExpertKernels

EXPERTS = [OperatorId(OperatorKind.EXPERT, 0, number) for number in range(4)]
PARTS = tuple(Operator(expert, 1200, 200) for expert in EXPERTS)
INVENTORY = Inventory({LogicalRank(): PARTS[:2], LogicalRank(ep=1): PARTS[2:]})
PLANNED = schedule_of(INVENTORY, 2)
MAKER = ScheduleMaker(
    PLANNED, range(1, 5), room_for_windows(PLANNED, (2, 3, 4)), ExpertKernels.EACH
)
ROOMY = dataclasses.replace(MAKER, room=room_for_windows(PLANNED, (1, 2, 3, 4)))
WORST = Measured(1e6, 1e3, 2.0, 0.5)
KNOWN = Popularity(Ordering.HARD).after_window([90, 1, 3, 80], 0.5)


def test_what_was_measured_under_a_schedule_counts_for_it_alone():
    timetable = Timetable.begun(schedule_of(INVENTORY, 4), 0).adopted(1, PLANNED, 6)
    assert noted(timetable, 7, WORST.vote) == Noted(7, 4, WORST)
    assert noted(timetable, 8, WORST.vote) is None
    assert noted(timetable, 10, WORST.vote) == Noted(10, 2, WORST)
    assert noted(timetable, 10, NOT_MEASURED) is None


def test_w_is_one_whose_slots_have_room():
    assert MAKER.sizes() == {2: (1400, 2600), 3: (1400, 3000), 4: (1400, 3400)}
    assert ROOMY.sizes() == {1: (2400, 2400), **MAKER.sizes()}
    none = RankRoom({2: SlotRoom(0, 0)})
    small = dataclasses.replace(MAKER, room=dict.fromkeys(INVENTORY.by_rank, none))
    assert list(small.sizes()) == [2]


def test_popular_experts_come_last_where_anything_is_counted():
    assert MAKER.wanted(2, Popularity(Ordering.INDEX)) is PLANNED
    assert MAKER.wanted(2, Popularity(Ordering.HARD)).slots == PLANNED.slots
    found = MAKER.wanted(2, KNOWN)
    assert [found.slots[expert] for expert in EXPERTS] == [1, 0, 0, 1]
    assert [PLANNED.slots[expert] for expert in EXPERTS] == [0, 1, 0, 1]


@pytest.mark.parametrize(("maker", "windows"), [(MAKER, (3, 4)), (ROOMY, (1, 3, 4))])
def test_another_schedule_with_room_may_follow(maker, windows):
    others = [each for each in (1, 2, 3, 4) if maker.may_follow(maker.by_index(each), PLANNED)]
    assert tuple(others) == windows
    assert maker.may_follow(maker.wanted(2, KNOWN), PLANNED)


@pytest.mark.parametrize("ordering", [Ordering.INDEX, Ordering.HARD])
@pytest.mark.parametrize(("window", "used"), [(1, None), (4, 1)])
def test_fewer_slots_than_half_are_come_to_in_several_changes(ordering, window, used):
    known = dataclasses.replace(KNOWN, ordering=ordering)
    at_once = ROOMY.wanted(window, known, used)
    assert not ROOMY.may_follow(at_once, ROOMY.by_index(4))
    between = ROOMY.wanted(window, known, used, after=ROOMY.by_index(4))
    assert (between.window, between.used_slots) == (4 if used else 2, 2)
    assert ROOMY.may_follow(between, ROOMY.by_index(4))
    assert ROOMY.wanted(window, known, used, after=between).slots == at_once.slots
    assert ROOMY.may_follow(at_once, between)


def test_slots_that_come_later_than_the_used_ones_are_empty():
    spread = ROOMY.wanted(4, KNOWN, used=1)
    assert (spread.window, spread.used_slots) == (4, 1)
    assert set(spread.bytes_by_slot.values()) == {(2400, 0, 0, 0)}
    assert ROOMY.used_of(spread) == 1
    assert ROOMY.used_of(ROOMY.wanted(4, KNOWN)) is None
    assert ROOMY.used_of(ROOMY.wanted(3, KNOWN, used=1)) is None
    assert ROOMY.may_follow(spread, ROOMY.by_index(2))
    assert not MAKER.may_follow(spread, ROOMY.by_index(2))
