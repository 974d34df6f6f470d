# SPDX-License-Identifier: Apache-2.0
"""Proposed schedules: there is room for them, and they travel off the training thread."""

import logging
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from megatron_moevement.policy.copies.placement import Host
from megatron_moevement.policy.copies.retention import LAG, max_log_steps, max_replayed_steps
from megatron_moevement.policy.copies.slot_ring import ring_capacity
from megatron_moevement.policy.job.operators import Inventory, Operator, OperatorId, OperatorKind
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.job.segments import Ends
from megatron_moevement.policy.window.skipping_schedule import schedule_of
from megatron_moevement.policy.window.timetable import Proposal, Trial, WindowDecision
from megatron_moevement.policy.window.weight_gradients import ExpertKernels
from megatron_moevement.runtime.slots.ring_file import RingShape
from megatron_moevement.settings.fault_tolerance import FaultTolerance
from megatron_moevement.strategies.moevement.protection.job_plan import Found, PlannedJob, plan_of
from megatron_moevement.strategies.moevement.protection.members import Member
from megatron_moevement.strategies.moevement.schedules.exchange import Proposed, ScheduleExchange
from megatron_moevement.strategies.moevement.schedules.schedule_changes import ScheduleChanges

EXPERTS = [OperatorId(OperatorKind.EXPERT, 0, number) for number in range(5)]
INVENTORY = Inventory({LogicalRank(): tuple(Operator(expert, 12, 2) for expert in EXPERTS)})
TO_THE_END = (Ends.INDEPENDENT, 40)
DECISION = WindowDecision(2, None, 24, 4, Trial(4, 1000, 1.25, 0.1 + 0.2, None))
SMALLER = Inventory({LogicalRank(): INVENTORY.by_rank[LogicalRank()][:4]})


@pytest.fixture
def store():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def proposed(version, schedule, decision=None):
    return Proposed(Proposal(version, schedule.digest, decision), schedule)


def test_what_one_rank_proposes_others_fetch(store):
    proposer, other, of_another_generation = (
        ScheduleExchange(name, INVENTORY) for name in ("first", "first", "second")
    )
    schedule = schedule_of(INVENTORY, 2)
    proposer.propose(3, lambda: proposed(3, schedule, DECISION))
    proposer.close()
    assert proposer.proposed == Proposed(Proposal(3, schedule.digest, DECISION), schedule)
    other.fetch(3)
    other.close()
    assert other.proposed == proposer.proposed
    assert of_another_generation.proposed is None


def test_nothing_is_proposed_where_nothing_is_to_change(store):
    exchange = ScheduleExchange("first", INVENTORY)
    exchange.propose(1, lambda: None)
    exchange.close()
    assert exchange.proposed is None


def test_what_fails_is_tried_again_when_asked_for(store, caplog):
    exchange = ScheduleExchange("first", INVENTORY)
    with caplog.at_level(logging.WARNING):
        exchange.propose(1, lambda: proposed(1, schedule_of(INVENTORY, 0)))
        exchange.close()
    assert "not agreed on yet" in caplog.text
    assert exchange.proposed is None
    exchange.propose(1, lambda: proposed(1, schedule_of(INVENTORY, 3)))
    exchange.close()
    assert exchange.proposed.schedule.window == 3


def test_a_store_that_is_lost_meanwhile_is_one_line(store, caplog, monkeypatch):
    exchange = ScheduleExchange("first", INVENTORY)
    lost = dist.DistNetworkError("Connection reset by peer\nException raised from recvBytes")
    monkeypatch.setattr(exchange, "_store", Mock(get=Mock(side_effect=lost)))
    with caplog.at_level(logging.WARNING):
        exchange.fetch(1)
        exchange.close()
    (record,) = caplog.records
    expected = "a proposed schedule is not agreed on yet: Connection reset by peer"
    assert (record.getMessage(), record.exc_info) == (expected, None)
    assert exchange.proposed is None


def test_a_schedule_of_other_operators_is_not_taken(store, caplog):
    proposer, other = (ScheduleExchange("first", each) for each in (INVENTORY, SMALLER))
    proposer.propose(1, lambda: proposed(1, schedule_of(INVENTORY, 2)))
    proposer.close()
    with caplog.at_level(logging.WARNING):
        other.fetch(1)
        other.close()
    assert "no slots of 4 operators" in caplog.text
    assert other.proposed is None


def planned(inventory, **windows):
    settings = FaultTolerance(moevement_replicas=0, **windows)
    member = Member.of(Host(0, "node", LogicalRank()), inventory.by_rank[LogicalRank()], 100, 50)
    return PlannedJob(settings, [member], *TO_THE_END)


def plan_for(inventory=INVENTORY, **windows):
    return plan_of(planned(inventory, **windows))


def test_there_is_room_for_the_most_and_the_largest_slots_that_limits_allow():
    plan = plan_for(moevement_window=3, moevement_min_window=2, moevement_max_window=5)
    (ring,), (log,) = plan.rings.values(), plan.logs.values()
    (least,) = plan_for(moevement_window=2).rings.values()
    assert plan.schedule.window == 3
    assert ring.capacity == ring_capacity(5, LAG)
    assert least.buffer_bytes < ring.buffer_bytes <= least.buffer_bytes * 1.05
    assert log.max_steps == max_log_steps(5, LAG + 1)
    assert plan.journal.retained_steps == max_replayed_steps(5, LAG) + 2
    others = [schedule_of(INVENTORY, window) for window in (1, 2, 5)]
    assert [each.fits_into(plan.room) for each in others] == [False, True, True]


def test_slots_of_windows_that_may_change_take_what_two_of_them_do():
    megabyte = 1 << 20
    large = tuple(Operator(expert, 12 * megabyte, 2 * megabyte) for expert in EXPERTS)
    inventory = Inventory({LogicalRank(): large})
    plan = plan_for(inventory, moevement_window=3, moevement_min_window=1, moevement_max_window=5)
    (ring,) = plan.rings.values()
    in_order = schedule_of(inventory, 5).bytes_by_slot[LogicalRank()]
    assert in_order == (20 * megabyte, 18 * megabyte, 16 * megabyte, 14 * megabyte, 12 * megabyte)
    # Windows as if all of their slots were as large as the largest: of W = 4 and of W = 2, then the
    # slot of W = 1 and the one that may not fit at the end.
    four, two = (max(schedule_of(inventory, w).bytes_by_slot[LogicalRank()]) for w in (4, 2))
    assert 0 < ring.room_bytes - (4 * four + 2 * two + 2 * 60 * megabyte) < megabyte
    assert ring.granule_bytes < megabyte
    assert [schedule_of(inventory, window).fits_into(plan.room) for window in range(1, 6)] == [
        True
    ] * 5


@pytest.mark.parametrize(
    ("shares", "limits", "launches"),
    [
        (
            ((8, 4, 9, 9, 6, 5, 1), (1, 1, 4, 1, 1, 5, 6)),
            {},
            {4: {}, 2: {"moevement_max_replay_steps": 3}, 1: {"moevement_max_replay_steps": 1}},
        ),
        (  # the second rank's largest slot of all W of 3 to 5 is one of W = 4
            ((3, 8, 2, 2, 9, 7), (3, 3, 5, 7, 4, 1)),
            {"moevement_min_window": 3, "moevement_max_window": 5},
            {4: {}, 3: {"moevement_max_replay_steps": 5}, 5: {"moevement_window": 5}},
        ),
    ],
)
def test_what_a_job_begins_with_does_not_decide_what_memory_is_like(shares, limits, launches):
    experts = [OperatorId(OperatorKind.EXPERT, 0, number) for number in range(len(shares[0]))]
    members = [
        Member.of(
            Host(number, "node", LogicalRank(dp=number)),
            tuple(
                Operator(expert, 12 * share, 2 * share)
                for expert, share in zip(experts, of_rank, strict=True)
            ),
            *(100, 50),
        )
        for number, of_rank in enumerate(shares)
    ]
    settings = [
        FaultTolerance(moevement_replicas=0, **limits, **each) for each in launches.values()
    ]
    plans = [plan_of(PlannedJob(each, members, *TO_THE_END)) for each in settings]
    assert [plan.schedule.window for plan in plans] == [*launches]
    first, *others = plans
    for other in others:
        assert (other.room, other.rings) == (first.room, first.rings)
        assert (other.logs, other.journal) == (first.logs, first.journal)
    windows = range(settings[0].min_window, settings[0].max_window + 1)
    inventory = first.schedule.inventory
    assert all(schedule_of(inventory, window).fits_into(first.room) for window in windows)


@pytest.mark.parametrize(("flags", "is_chosen"), [({}, True), ({"moevement_window": 3}, False)])
def test_cpu_times_are_read_where_w_is_chosen_alone(flags, is_chosen):
    settings = FaultTolerance(moevement_replicas=0, **flags)
    memory = Mock(plan=plan_for(**flags))
    use = {"popularity": Mock(), "kernels": ExpertKernels.EACH}
    changes = ScheduleChanges(memory, settings, Mock(), Mock(), **use)
    assert (changes.cpu_share() is not None) is is_chosen


def test_a_job_without_limits_takes_no_more_than_its_window_needs():
    (ring,) = plan_for(moevement_window=3).rings.values()
    assert ring == RingShape.equal(
        ring_capacity(3, LAG), ring.buffer_bytes, ring.max_parts, ring.extras_bytes
    )


@pytest.mark.parametrize(
    ("operators", "flags", "window"),
    [
        (5, {}, 4),
        (3, {}, 3),
        (1, {}, 1),
        (3, {"moevement_max_replay_steps": 3}, 2),
        (3, {"moevement_min_window": 4}, 4),
        (3, {"moevement_window": 4}, 4),
    ],
)
def test_a_job_that_chooses_w_begins_with_no_empty_slot(operators, flags, window):
    inventory = Inventory({LogicalRank(): INVENTORY.by_rank[LogicalRank()][:operators]})
    job = planned(inventory, **flags)
    plan = plan_of(job)
    schedule = plan.schedule
    assert schedule.window == window
    assert sum(map(bool, schedule.full)) == min(operators, window)
    assert plan_of(job, found=Found.of(job, plan)).schedule == schedule
