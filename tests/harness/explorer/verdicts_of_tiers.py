# SPDX-License-Identifier: Apache-2.0
"""What the oracle demands of tiers: a start without memory goes as far as the newest whole one."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_moevement.policy.tiers.tier import may_begin_with_tier
from tests.harness.explorer.outcome import Outcome
from tests.harness.explorer.scenario import Scenario
from tests.harness.explorer.timeline import Timeline


def check_tiers(scenario: Scenario, outcome: Outcome, timeline: Timeline) -> Iterator[str]:
    """Checks that no tier is passed over, and that what is reported of one holds."""
    del scenario, outcome
    for recovery in filter(timeline.has_come_back, timeline.recoveries):
        led_to, newest = recovery.target, timeline.newest_tier(recovery)
        if newest is not None and may_begin_with_tier(recovery.facts) and led_to < newest:
            yield f"{recovery.name}: it led to {led_to}, and the tier of step {newest} is whole"
        for launch, step in timeline.from_tiers:
            if launch == recovery.launch and led_to < step:
                yield f"{recovery.name}: it led to {led_to}, from the tier of step {step}"
