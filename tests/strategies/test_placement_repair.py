# SPDX-License-Identifier: Apache-2.0
"""The placement in force is read from what processes hold, and repaired where some are lost."""

import pytest

from megatron_moevement.policy.copies.placement import HeldCopies, Host, place_replicas
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.runtime.slots.journal import JournalShape
from megatron_moevement.runtime.slots.ring_file import RingShape
from megatron_moevement.strategies.moevement.protection.job_plan import JobPlan
from megatron_moevement.strategies.moevement.protection.placement_of_holders import (
    add_held,
    keep_placement,
)
from megatron_moevement.strategies.strategy import RecoveryAbortedError

RANKS = [LogicalRank(dp=number) for number in range(6)]
RING = RingShape.equal(5, 1 << 20, 1)


def plan_of(hosts, replicas=1, limit_bytes=None):
    return JobPlan(
        schedule=None,
        hosts=tuple(hosts),
        placement=place_replicas(hosts, replicas),
        rings=dict.fromkeys(RANKS, RING),
        journal=JournalShape(2, 2, 2),
        limit_bytes=limit_bytes,
    )


def host(process, rank):
    return Host(process, f"domain {process % 7}", RANKS[rank])


@pytest.fixture
def kept():
    """Returns a function: the placement that processes keep who hold slots of ranks up to steps."""

    def keep(plan, held):
        told = [
            [process, [[str(RANKS[rank]), step] for rank, step in ranks.items()]]
            for process, ranks in held.items()
        ]
        copies = HeldCopies()
        for each in told:
            add_held(copies, each)
        found = keep_placement(plan, copies)
        return {rank.dp: holders for rank, holders in found.placement.holders.items()}

    return keep


def holders_of(plan):
    return {rank.dp: holders for rank, holders in plan.placement.holders.items()}


def held_by(plan):
    return {one.process: {rank.dp: 9 for rank in plan.kept_for(one.process)} for one in plan.hosts}


def test_where_nothing_is_held_the_placement_is_made_anew(kept):
    plan = plan_of([host(number, number) for number in range(6)])
    assert kept(plan, {number: {} for number in range(6)}) == holders_of(plan)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("lost", range(6))
def test_a_newcomer_takes_over_what_the_lost_process_held(kept, lost, replicas):
    before = plan_of([host(number, number) for number in range(6)], replicas)
    hosts = [host(number, number) for number in range(6) if number != lost] + [host(6, lost)]
    after = plan_of(hosts, replicas)
    holding = held_by(before)
    del holding[lost]
    holding[6] = {}
    expected = {
        rank: {6 if holder == lost else holder for holder in holders}
        for rank, holders in holders_of(before).items()
    }
    assert {rank: set(holders) for rank, holders in kept(after, holding).items()} == expected


def test_who_was_replaced_as_a_holder_is_none_any_more(kept):
    plan = plan_of([host(number, number) for number in range(6)])
    holding = held_by(plan)
    (former,) = holders_of(plan)[0]
    other = next(number for number in range(1, 6) if number != former)
    holding[former][0] = 4
    holding[other][0] = 9
    assert kept(plan, holding)[0] == (other,)


def test_where_keeping_would_take_too_much_memory_copies_are_spread_anew(kept):
    plan = plan_of([host(number, number) for number in range(6)])
    limit = max(account.total_bytes for account in plan.accounts().values())
    plan = plan_of(plan.hosts, limit_bytes=limit)
    crowded = {number: {} for number in range(6)}
    crowded[5] = dict.fromkeys(range(5), 9)
    assert kept(plan, crowded) == holders_of(plan)
    assert kept(plan_of(plan.hosts), crowded)[1] == (5,)


def test_a_restart_keeps_as_many_copies_as_the_limit_of_host_memory_has_room_for():
    ranks = [Host(number, "a", RANKS[number]) for number in range(2)]
    spares = [Host(2, "b"), Host(3, "b"), Host(4, "c"), Host(5, "c")]
    plan = plan_of([*ranks, *spares], replicas=2)
    limit = max(account.total_bytes for account in plan.accounts().values())
    plan = plan_of(plan.hosts, replicas=2, limit_bytes=limit)
    assert plan.within_limit() is plan
    fewer = plan_of([*ranks, *spares[1:]], replicas=2, limit_bytes=limit).within_limit()
    assert [len(holders) for holders in fewer.placement.holders.values()] == [1, 1]
    assert fewer.warning is not None
    assert "no room for 2 copies" in fewer.warning
    fewer.check_limit(*(each.process for each in fewer.hosts))
    with pytest.raises(RecoveryAbortedError, match="may take"):
        plan_of([*ranks, *spares[3:]], replicas=2, limit_bytes=limit).within_limit()
