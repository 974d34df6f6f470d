# SPDX-License-Identifier: Apache-2.0
"""A replay that drops the gradients of frozen operators, to measure what skipping them saves."""

from random import Random

import pytest

from megatron_moevement.runtime.observation.events import EventName, read_events
from tests.harness.interruption import Run, digest_differences
from tests.harness.protected_run import Case, check_replays

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

CASE = Case.of("edp3 bf16 distributed-overlap", 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "weight_gradients"),
    [(("--moevement-no-frozen-skip",), "dropped"), ((), "skipped")],
)
def test_weight_gradients_may_be_dropped_instead_of_skipped(
    megatron_fork_server, text, uninterrupted, tmp_path, flags, weight_gradients
):
    run = Run(CASE.protected_program(megatron_fork_server, text, *flags), tmp_path)
    run.kill(CASE.protected_from + 1, Random(0))
    assert digest_differences(run.finish(), uninterrupted(CASE)) == []
    check_replays(run, CASE, launches=1)
    replays = [one for one in read_events(run.events) if one.event is EventName.REPLAY]
    assert {one.fields["weight_gradients"] for one in replays} == {weight_gradients}
