# SPDX-License-Identifier: Apache-2.0
"""Seeded worlds: the real decisions keep every invariant, whatever fails."""

from collections import Counter

import pytest

from megatron_moevement.policy.job.segments import ScopeKind
from megatron_moevement.policy.recovery.plan import Verdict
from megatron_moevement.policy.watching.window_choice import Reason
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.testing.campaign import Tally, play_seeds
from megatron_moevement.testing.world.proposals import EMPTY, ORDER

SEEDS = 300
AT_A_TIME = 50


@pytest.fixture(scope="module")
def tallies():
    """What came of each chunk of seeds that a test has run."""
    return {}


@pytest.mark.parametrize("first", range(0, SEEDS, AT_A_TIME))
def test_nothing_is_violated(first, tallies):
    tallies[first] = play_seeds(range(first, first + AT_A_TIME), None)
    assert tallies[first].seeds == AT_A_TIME
    assert tallies[first].failures == []


def test_these_seeds_reach_every_verdict_and_every_kind_of_scope(tallies):
    total = Tally()
    for first in range(0, SEEDS, AT_A_TIME):
        total.merge(tallies.get(first) or play_seeds(range(first, first + AT_A_TIME), None))
    assert total.seeds == SEEDS
    assert set(total.verdicts) == {verdict.value for verdict in Verdict}
    assert set(total.scopes) == {kind.value for kind in ScopeKind} - {ScopeKind.NONE.value}
    assert min(total.scopes.values()) >= 5
    assert len(total.replayed_steps) >= 9


def test_these_seeds_consider_another_schedule_for_every_reason(tallies):
    total = Counter()
    for first in range(0, SEEDS, AT_A_TIME):
        tally = tallies.get(first) or play_seeds(range(first, first + AT_A_TIME), None)
        total.update(tally.schedules)
    no_reasons = {Reason.FITS, Reason.COSTS}  # these jobs are too short for a failed trial
    reasons = {reason.value for reason in set(Reason) - no_reasons} | {ORDER, EMPTY}
    assert set(total) == reasons
    assert min(total.values()) >= 5


def test_these_seeds_come_to_every_place_where_production_has_faults(tallies):
    places = set()
    for first in range(0, SEEDS, AT_A_TIME):
        places |= (tallies.get(first) or play_seeds(range(first, first + AT_A_TIME), None)).places
    assert places == {place.value for place in FaultPoint}
