# SPDX-License-Identifier: Apache-2.0
"""What a process takes over counts like what it was meant to keep."""

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.policy.copies.placement import Host, Placement
from megatron_moevement.policy.job.operators import Inventory, Operator, OperatorId, OperatorKind
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import WindowSchedule
from megatron_moevement.runtime.slots.journal import JournalShape
from megatron_moevement.runtime.slots.ring_file import RingShape
from megatron_moevement.strategies.moevement.protection.job_plan import JobPlan

FIRST, SECOND, THIRD = (LogicalRank(pp=stage) for stage in range(3))
GATE = Operator(OperatorId(OperatorKind.GATE, 0), 12, 2)
RING = RingShape.equal(3, 1 << 16, 4)


def plan(limit_bytes=None):
    """Returns a plan in which each of three processes keeps copies of the rank before its own."""
    return JobPlan(
        schedule=WindowSchedule(Inventory({FIRST: (GATE,)}), 1, {GATE.id: 0}),
        hosts=tuple(Host(n, f"domain {n}", rank) for n, rank in enumerate((FIRST, SECOND, THIRD))),
        placement=Placement({FIRST: (1,), SECOND: (2,), THIRD: (0,)}, 1, 1),
        rings=dict.fromkeys((FIRST, SECOND, THIRD), RING),
        journal=JournalShape(5, 1 << 10, 10),
        limit_bytes=limit_bytes,
    )


def test_the_account_grows_by_one_ring_on_one_process():
    before, after = plan().accounts(), plan().with_holder(FIRST, 2).accounts()
    assert plan().with_holder(FIRST, 2).kept_for(2) == (FIRST, SECOND)
    grown = [after[each].total_bytes - before[each].total_bytes for each in range(3)]
    assert grown == [0, 0, RING.total_bytes]


def test_the_limit_holds_for_it_too():
    just_enough = plan().accounts()[2].total_bytes + RING.total_bytes
    plan(just_enough).with_holder(FIRST, 2).check_limit(2)
    plan(just_enough - 1).check_limit(0, 1, 2)
    with pytest.raises(UserError, match=f"process 2 needs {just_enough} bytes .* may take"):
        plan(just_enough - 1).with_holder(FIRST, 2).check_limit(2)
