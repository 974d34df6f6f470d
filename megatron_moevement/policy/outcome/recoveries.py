# SPDX-License-Identifier: Apache-2.0
"""The recoveries of a job, from what its ranks recorded of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

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
    found: list[dict[int, EventRecord]] = []
    for record in events:
        if record.event is not EventName.RECOVERED:
            continue
        if not found or not is_of_same(found[-1], record):
            found.append({})
        found[-1][record.logical_rank] = record
    told = [list(each.values()) for each in found]
    return [EndedRecovery(each[0].time, recovery_of(each)) for each in told]


def is_of_same(told: Mapping[int, EventRecord], record: EventRecord) -> bool:
    """Returns whether a rank tells of the recovery that others have told of before.

    Args:
        told: by rank, of one recovery, by one rank at least.
    """
    first = next(iter(told.values()))
    place = (record.generation, record.iteration)
    return (first.generation, first.iteration) == place and record.logical_rank not in told


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
