# SPDX-License-Identifier: Apache-2.0
"""What a plan has for each rank: slots that it gets, slots that it sends, and its ring."""

import itertools

from hypothesis import given, settings

from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.recovery.plan import Origin, Verdict, WindowEdges
from megatron_moevement.policy.recovery.recovery_planner import plan_recovery
from tests.harness.facts_strategies import first_faults, second_faults
from tests.harness.facts_truth import holders

CASES = first_faults() | second_faults()
REPLAYS = {Verdict.LOCALIZED, Verdict.GLOBAL}
often = settings(max_examples=60)


@often
@given(CASES)
def test_every_rank_that_goes_on_from_its_state_gets_what_is_left_of_the_windows_to_come(case):
    facts = case.facts
    plan = plan_recovery(facts)
    if plan.verdict not in {Verdict.RESUME, *REPLAYS} or plan.is_from_durable:
        return
    if plan.edges is WindowEdges.RESTARTED:
        assert not plan.fetches
        return
    got = {(each.rank, each.slot) for each in plan.slot_fetches()}
    windows = {held.window for each in facts.processes for held in each.holdings}
    needed = [one for one in windows if plan.persisted is None or one >= plan.persisted]
    for rank, window in itertools.product(facts.layout.ranks, needed):
        for slot in range(window.size):
            key, having = SlotKey(rank, window, slot), holders(facts, rank, window, slot)
            if plan.origin(rank.pp) is Origin.WINDOW:
                continue
            if key.step < plan.start(rank.pp):
                assert ((rank, key) in got) == bool(having)
            elif key.window != plan.window or rank.pp not in plan.start_of:  # else it is loaded
                is_own = facts.by_rank[rank].process in having
                assert ((rank, key) in got) == (is_own and key.step == plan.start(rank.pp))


@often
@given(CASES)
def test_every_slot_that_a_rank_goes_on_with_comes_to_the_holders_that_lack_it(case):
    facts = case.facts
    plan = plan_recovery(facts)
    for rank in facts.layout.ranks:
        own = plan.for_rank(rank)
        sent = {send.slot: send.to for send in own.sends}
        got = {SlotKey(rank, one.slot.window, one.slot.slot) for one in own.fetches}
        for key in got:
            is_whole = {SlotKey(rank, key.window, slot) for slot in range(key.window.size)} <= got
            assert (key in sent) == (is_whole or key.window != plan.persisted)
            having = holders(facts, rank, key.window, key.slot)
            wanted = set(facts.by_rank[rank].holders) - having
            assert key not in sent or set(sent.pop(key)) == wanted
        assert not sent


@often
@given(CASES)
def test_the_ring_of_a_rank_holds_what_it_fetches_and_captures_what_follows(case):
    plan = plan_recovery(case.facts)
    for rank in case.facts.layout.ranks:
        own = plan.for_rank(rank)
        steps = {fetch.slot.step for fetch in own.fetches}
        assert steps <= set(range(own.oldest, own.next_step))
        if own.origin is not Origin.WINDOW and plan.window is None:
            assert own.next_step - own.start == (own.start in steps)
        if own.converts:
            assert steps >= set(range(own.start, plan.window.last + 1))
            assert own.next_step == plan.window.last + 1
        if own.guarded is not None:
            assert {send.slot.window for send in own.sends} >= {own.guarded}
            slots = {send.slot.slot for send in own.sends if send.slot.window == own.guarded}
            assert slots == set(range(own.guarded.size))
