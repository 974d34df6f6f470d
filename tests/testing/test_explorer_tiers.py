# SPDX-License-Identifier: Apache-2.0
"""The oracle finds a whole tier that was passed over."""

import pytest

from megatron_moevement.policy.recovery.plan import Verdict
from megatron_moevement.runtime.observation.events import EventLog, EventName
from tests.harness.doctored_run import DURABLE, SCENARIO, Run, RunThatGoesBack
from tests.harness.explorer.timeline import Timeline
from tests.harness.explorer.verdicts_of_tiers import check_tiers


def complaints_of(outcome):
    timeline = Timeline(outcome, SCENARIO.job.protection)
    return list(check_tiers(SCENARIO, outcome, timeline))


@pytest.fixture
def back(tmp_path):
    return RunThatGoesBack(tmp_path)


@pytest.mark.parametrize(("tier", "found"), [(DURABLE, 0), (DURABLE + 1, 1)])
def test_a_whole_tier_that_leads_further_is_not_passed_over(back, monkeypatch, tier, found):
    back.tier = tier
    assert len(complaints_of(back.outcome(monkeypatch))) == found


def test_a_rollback_in_place_gives_states_up_for_no_less_than_a_tier(back, monkeypatch):
    back.facts = back.found_first
    back.planned()
    assert back.plan.verdict is Verdict.ROLLBACK
    back.tier = DURABLE + 1
    assert len(complaints_of(back.outcome(monkeypatch))) == 1


def test_a_tier_does_not_count_where_a_state_that_trains_is_left(tmp_path, monkeypatch):
    run = Run(tmp_path)
    run.tier = run.plan.target + 1
    assert complaints_of(run.outcome(monkeypatch)) == []


def test_a_tier_that_was_written_after_the_recovery_does_not_count(back, monkeypatch):
    outcome = back.outcome(monkeypatch)
    with EventLog(outcome.launches[0].event_dir, 0, back.facts.generation) as events:
        tier = {"start": 20, "size": 3, "tier_bytes": 1, "duration_s": 1.0}
        events.emit(EventName.TIER_WRITTEN, 23, **tier)
    assert complaints_of(outcome) == []


def test_a_tier_of_a_history_that_was_given_up_does_not_count(back, monkeypatch):
    back.tier = DURABLE + 1
    outcome = back.outcome(monkeypatch)
    (launch,) = outcome.launches
    back.is_written(launch.event_dir, 50.0, monkeypatch)
    timeline = Timeline(outcome, SCENARIO.job.protection)
    assert [timeline.newest_tier(one) for one in timeline.recoveries] == [DURABLE + 1, None]
