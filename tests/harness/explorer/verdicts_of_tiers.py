# SPDX-License-Identifier: Apache-2.0
"""What the oracle demands of tiers: nothing goes back further than the newest whole one."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_moevement.policy.tiers.tier import may_begin_with_tier
from tests.harness.explorer.outcome import Outcome
from tests.harness.explorer.scenario import Scenario
from tests.harness.explorer.timeline import Timeline


def check_tiers(scenario: Scenario, outcome: Outcome, timeline: Timeline) -> Iterator[str]:
    """Checks that no tier is passed over where no state that trains is kept."""
    del scenario, outcome
    for recovery in filter(timeline.has_come_back, timeline.recoveries):
        led_to, newest = recovery.target, timeline.newest_tier(recovery)
        is_free = may_begin_with_tier(recovery.facts, recovery.plan)
        if is_free and newest is not None and led_to < newest:
            yield f"{recovery.name}: it led to {led_to}, and the tier of step {newest} is whole"
