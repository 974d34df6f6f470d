# SPDX-License-Identifier: Apache-2.0
"""Invariants of what a plan reads: it is where the facts have it, and arrives."""

from __future__ import annotations

from megatron_moevement.policy.facts.facts import Facts
from megatron_moevement.policy.recovery.plan import Plan, RankPlan
from megatron_moevement.testing.world.process import Process
from megatron_moevement.testing.world.violations import require


def has_sources(plan: Plan, facts: Facts) -> None:
    """Checks invariant 5: what a plan reads from a log or a store was published to be there."""
    for log in plan.logs:
        wanted = range(log.first, log.last + 1)
        for process in facts.stage(log.sender):
            there = [each.steps for each in process.logs if each.direction is log.direction]
            covers = any(steps.issuperset(wanted) for steps in there)
            what = f"p{process.process} is to serve steps {log.first} to {log.last} from its log"
            require(covers, "5 sources", what)
    held = {
        (process.process, holding.owner, holding.window): holding.slots
        for process in facts.processes
        for holding in process.holdings
    }
    for fetch in plan.slot_fetches():
        key = fetch.slot
        for number in fetch.sources:
            has = held.get((number, key.owner, key.window), 0) >> key.slot & 1
            require(has == 1, "5 sources", f"p{number} is to send", key)


def has_fetched(process: Process, own: RankPlan) -> None:
    """Checks invariant 2: no slot that a rank gets has taken the room of another one."""
    for fetch in own.fetches:
        is_there = fetch.slot._replace(owner=own.rank) in process.store.slots
        require(is_there, "2 fetched", process, "has no more what it got:", fetch.slot)
