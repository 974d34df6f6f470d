# SPDX-License-Identifier: Apache-2.0
"""The parts of an outage add up to it, whenever it was noticed."""

import pytest

from megatron_moevement.policy.outcome.outage import OutageBegin


@pytest.mark.parametrize("noticed_s", [20.0, 20.75, 21.25])  # the last step ended at 20.5
def test_the_parts_are_all_of_the_time_since_the_last_step(noticed_s):
    begin = OutageBegin.between(noticed_s, 20.5, 22.0, 23.5)
    assert sum(begin.durations_s.values()) == 3.0
    assert min(begin.durations_s.values()) >= 0
    assert begin.noticed_s + begin.teardown_s == 22.0
    assert begin.noticed_s == 20.5 + begin.detect_s == max(noticed_s, 20.5)


def test_before_any_step_an_outage_begins_when_it_is_noticed():
    begin = OutageBegin.between(20.0, None, 22.0, 23.5)
    assert begin.durations_s == {"detect": 0.0, "teardown": 2.0, "rendezvous": 1.5}
