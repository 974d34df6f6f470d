"""How a job without spares ends: what is left is written, and said to be worth what it is."""

from hypothesis import given, settings

from megatron_moevement.policy.recovery.plan import Ending, Verdict
from megatron_moevement.policy.recovery.planner import plan_recovery
from tests.harness.facts_strategies import first_faults, second_faults
from tests.harness.facts_truth import (
    has_all,
    learnt_windows,
    loads_of,
    persisted_windows,
    target_of,
    with_ledger,
)

CASES = first_faults() | second_faults()
often = settings(max_examples=100)


def whole_windows(facts):
    """Returns the persisted windows that a launch can replay all stages from, to the target."""
    return {
        window
        for window in persisted_windows(facts)
        if has_all(facts, window, dict.fromkeys(facts.layout.ranks, 0))
        and with_ledger(facts, window.start + 1, target_of(facts))
    }


@often
@given(CASES)
def test_without_a_spare_the_job_ends_with_all_that_is_left_written(case):
    facts = case.facts
    plan = plan_recovery(facts)
    assert (plan.ending is not Ending.NONE) == (plan.verdict is Verdict.ABORT)
    held = any(each.holdings for each in facts.processes)
    assert plan.is_flush == bool(facts.vacant and held)
    if facts.vacant:
        assert plan.verdict is Verdict.ABORT
        assert plan.window == max(whole_windows(facts), default=None)


@often
@given(CASES)
def test_what_the_next_launch_is_told_to_replay_from_is_whole(case):
    plan = plan_recovery(case.facts)
    if not plan.is_flush or plan.window is None:
        assert plan.replays or not plan.is_flush or not plan.fetches
        return
    assert loads_of(plan, case.facts) == dict.fromkeys(case.facts.layout.ranks, 0)
    assert plan.ledger_source in with_ledger(case.facts, plan.window.start + 1, plan.target)
    assert plan.persisted == max(learnt_windows(case.facts))
