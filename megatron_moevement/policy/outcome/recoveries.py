# SPDX-License-Identifier: Apache-2.0
"""The recoveries of a job, from what its ranks recorded of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron_moevement.policy.accounting.event import EventName, EventRecord
from megatron_moevement.policy.job.guarantee import Level
from megatron_moevement.policy.outcome.account import RankAccount, RecoveryAccount
from megatron_moevement.policy.recovery.plan import Verdict


@dataclasses.dataclass(frozen=True)
class EndedRecovery:
    """A recovery, and when the first rank went on after it, in seconds since the epoch."""

    time_s: float
    account: RecoveryAccount


def ended_recoveries(events: Sequence[EventRecord]) -> list[EndedRecovery]:
    """Returns the recoveries that ended, in the order of time.

    Args:
        events: of all processes, in the order of time. A launch with the same folder as the one
            before it begins with generation 0 again, so a rank that tells of the same generation
            again tells of another recovery.
    """
    found: list[list[EventRecord]] = []
    for record in events:
        if record.event is not EventName.RECOVERED:
            continue
        if found and is_of_same(found[-1], record):
            found[-1].append(record)
        else:
            found.append([record])
    return [EndedRecovery(told[0].time, recovery_of(told)) for told in found]


def is_of_same(told: Sequence[EventRecord], record: EventRecord) -> bool:
    """Returns whether a rank tells of the recovery that others have told of before."""
    place = (record.generation, record.iteration)
    ranks = {one.logical_rank for one in told}
    return {(one.generation, one.iteration) for one in told} == {place} and (
        record.logical_rank not in ranks
    )


def recovery_of(told: Sequence[EventRecord]) -> RecoveryAccount:
    """Returns a recovery from the events of its ranks, of some of them at least."""
    first = told[0]
    return RecoveryAccount(
        generation=first.generation,
        verdict=Verdict(first.fields["verdict"]),
        scope=tuple(first.fields["scope"]),
        target=first.iteration,
        level=Level(first.fields["guarantee"]),
        ranks=[
            RankAccount.out_of(
                # A log of an older build says nothing of copies that were moved.
                {"moved_copies": 0, **one.fields, "proof": one.fields["replay_proof"]}
            )
            for one in told
        ],
    )
