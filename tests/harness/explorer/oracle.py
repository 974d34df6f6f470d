# SPDX-License-Identifier: Apache-2.0
"""The oracle: judges what came of a scenario by what is promised, not by how it is done."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from tests.harness.explorer.outcome import Outcome
from tests.harness.explorer.scenario import Scenario
from tests.harness.explorer.timeline import Timeline
from tests.harness.explorer.verdicts_of_accounts import check_account
from tests.harness.explorer.verdicts_of_ends import (
    check_ends,
    check_leftovers,
    check_output,
    check_restarts,
    check_time,
)
from tests.harness.explorer.verdicts_of_recoveries import (
    check_copies,
    check_lost_work,
    check_plans,
    check_replays,
    check_targets,
)
from tests.harness.explorer.verdicts_of_tiers import check_tiers
from tests.harness.interruption import digest_differences


@dataclasses.dataclass(frozen=True)
class Complaint:
    """Something that is not as promised.

    Attributes:
        check: which promise.
        detail: what was seen.
    """

    check: str
    detail: str


Check = Callable[[Scenario, Outcome, Timeline], Iterator[str]]


def check_bits(scenario: Scenario, outcome: Outcome, timeline: Timeline) -> Iterator[str]:
    """Checks that the job came to its end with the bits of the run without a fault."""
    del scenario, timeline
    if outcome.digest is None:
        yield "the job never came to its end"
        return
    found = digest_differences(outcome.digest, outcome.reference)
    if found:
        yield f"{len(found)} digests or losses differ, the first: {', '.join(found[:3])}"


CHECKS: dict[str, Check] = {
    "bits": check_bits,
    "time": check_time,
    "ends": check_ends,
    "restarts": check_restarts,
    "plans": check_plans,
    "targets": check_targets,
    "copies": check_copies,
    "lost work": check_lost_work,
    "replays": check_replays,
    "tiers": check_tiers,
    "leftovers": check_leftovers,
    "output": check_output,
    "account": check_account,
}
"""By the name of the promise."""


def judge(
    scenario: Scenario, outcome: Outcome, checks: Mapping[str, Check] = CHECKS
) -> list[Complaint]:
    """Returns what is not as promised; empty when all of it is."""
    timeline = Timeline(outcome, scenario.job.protection)
    return [
        Complaint(name, detail)
        for name, check in checks.items()
        for detail in check(scenario, outcome, timeline)
    ]
