# SPDX-License-Identifier: Apache-2.0
"""Incidents: each outage of a job, with who was lost, what was done about it, and what it cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_moevement.policy.accounting.account import JobAccount, ProcessAccount
from megatron_moevement.policy.accounting.job import Job, Outage
from megatron_moevement.policy.accounting.parts import Part
from megatron_moevement.policy.outcome.account import RecoveryAccount
from megatron_moevement.policy.outcome.replay_proof import proof_of_all
from megatron_moevement.policy.report.casualties import (
    NAMED,
    Casualty,
    Describe,
    lost_at_end,
    lost_in_place,
    summary,
)
from megatron_moevement.policy.report.observed import Observed, Protected
from megatron_moevement.policy.report.restart import Restart

_SECOND = 1e6
_ABSENT = (Part.GONE, Part.SPARE, Part.START_UP, Part.UNEXPLAINED)
"""What a process does in an outage that others do not wait for, unless all of them do it."""


@dataclasses.dataclass(frozen=True)
class Clock:
    """Turns times of a job into seconds from its begin; it begins at microseconds of the epoch."""

    begun_us: int

    def __call__(self, at_us: int | None) -> float | None:
        """Returns the seconds from the begin, to the millisecond."""
        return None if at_us is None else round((at_us - self.begun_us) / _SECOND, 3)


@dataclasses.dataclass(frozen=True)
class _Incident:
    """An outage with what the events have of it.

    Attributes:
        number: from 1 on.
        since_us: the end of the outage before, or the begin of the job.
        restarts: of its generations, in the order of time.
        casualties: the first one first.
    """

    number: int
    outage: Outage
    since_us: int
    restarts: Sequence[Restart]
    casualties: Sequence[Casualty]


def incidents_of(
    job: Job, account: JobAccount, observed: Observed, describe: Describe
) -> list[dict[str, Any]]:
    """Returns a document for each outage, in the order of time; times in seconds from the begin."""
    clock = Clock(account.begun_us)
    found = []
    since_us = account.begun_us
    for index, outage in enumerate(account.outages):
        restarts = _restarts(job, outage, account.outages[:index], observed)
        casualties = _casualties(job, outage, since_us, restarts, describe)
        own = [restart for _, restart in restarts]
        incident = _Incident(index + 1, outage, since_us, own, casualties)
        found.append(_document(incident, index, account, observed, clock))
        since_us = account.begun_us + account.wall_us if outage.end_us is None else outage.end_us
    return found


def casualty_document(casualty: Casualty, clock: Clock) -> Mapping[str, Any]:
    """Returns a casualty as JSON holds it."""
    at = clock(casualty.at_us)
    found = dataclasses.asdict(casualty)
    del found["at_us"]
    return {**found, "at": at, "line": casualty.line}


def _restarts(
    job: Job, outage: Outage, before: Sequence[Outage], observed: Observed
) -> list[tuple[int, Restart]]:
    """Returns the generations that an outage is made of, with their launches."""
    last = (outage.launch, outage.generation)
    first = (before[-1].launch, before[-1].generation) if before else (0, 0)
    places = [
        (index, number)
        for index, launch in enumerate(job.launches)
        for number in launch.generations
        if first < (index, number) <= last
    ]
    return [(index, observed.restarts[index, number]) for index, number in places]


def _casualties(
    job: Job,
    outage: Outage,
    since_us: int,
    restarts: Sequence[tuple[int, Restart]],
    describe: Describe,
) -> list[Casualty]:
    found: list[Casualty] = []
    for index, restart in restarts:
        found += lost_in_place(restart.losses.values(), job.launches[index], describe)
    if outage.launch and outage.generation == 0:  # the launch before it has ended
        known = {one.process for one in found}
        ended = lost_at_end(job.launches[outage.launch - 1], since_us, describe)
        found += [one for one in ended if one.process not in known]
    return found


def _document(
    incident: _Incident, index: int, account: JobAccount, observed: Observed, clock: Clock
) -> dict[str, Any]:
    outage, restarts = incident.outage, incident.restarts
    until_us = account.begun_us + account.wall_us if outage.end_us is None else outage.end_us
    accounts = [found for restart in restarts if (found := restart.account()) is not None]
    plans = [restart.plan for restart in restarts if restart.plan is not None]
    noticed = [restart.noticed_us for restart in restarts if restart.noticed_us is not None]
    steps = [restart.committed for restart in restarts if restart.committed is not None]
    representative = _representative(account, index)
    return {
        "number": incident.number,
        "launch": outage.launch,
        "generation": outage.generation,
        "faults": outage.faults,
        "is_relaunch": outage.launch > 0 and outage.generation == 0,
        "start": clock(outage.start_us),
        "noticed": clock(min(noticed, default=None)),
        "end": clock(outage.end_us),
        "duration_s": (until_us - outage.start_us) / _SECOND,
        "is_over": outage.end_us is not None,
        "step": max(steps, default=None),
        "phases": sorted({phase for restart in restarts for phase in restart.phases}),
        "summary": summary(incident.casualties),
        "casualties": [casualty_document(one, clock) for one in incident.casualties[:NAMED]],
        "lost_processes": len(incident.casualties),
        "injected": _injected(observed, incident.since_us, until_us, clock),
        "of_process": None if representative is None else representative.process,
        "parts_s": {} if representative is None else _seconds(representative.outages_us[index]),
        "cost_rank_s": (until_us - outage.start_us) / _SECOND * account.ranks,
        "plan": plans[-1] if plans else None,
        "recovery": _recovery(accounts[-1]) if accounts else None,
        "differed": [one.differed for one in restarts if one.differed is not None],
        "protection": {
            "before": _newest(observed.protected, outage.start_us),
            "after": _next(observed.protected, outage.end_us),
        },
    }


def _recovery(account: RecoveryAccount) -> Mapping[str, Any]:
    proof = proof_of_all(one.proof for one in account.ranks)
    return {
        "line": account.line,
        "verdict": account.verdict.value,
        "scope": account.scope,
        "target": account.target,
        "guarantee": account.level.value,
        "replayed_steps": account.replayed_steps,
        "verified": account.verified,
        "proof": proof.words if account.scope else None,
        "unproven": proof.unproven,
        "duration_s": account.duration_s,
        "owed_copies": account.owed_copies,
        "moved_copies": sum(one.moved_copies for one in account.ranks),
    }


def _representative(account: JobAccount, index: int) -> ProcessAccount | None:
    """Returns the process that the others waited for: it was there all the time, and waited least.

    Where no process was there all the time, one of those that were there longest.
    """

    def order(one: ProcessAccount) -> tuple[int, int, int]:
        parts = one.outages_us[index]
        absent = sum(parts.get(part, 0) for part in _ABSENT)
        return absent, parts.get(Part.WAIT, 0), one.process

    return min(account.processes, key=order, default=None)


def _injected(
    observed: Observed, since_us: int, until_us: int, clock: Clock
) -> list[Mapping[str, Any]]:
    return [
        {
            "at": clock(one.at_us),
            "rank": one.rank,
            "step": one.step,
            "kind": one.kind,
            "where": one.where,
        }
        for one in observed.injected
        if since_us <= one.at_us < until_us
    ]


def _newest(levels: Sequence[Protected], at_us: int) -> Mapping[str, Any] | None:
    known = [one for one in levels if one.at_us <= at_us]
    return known[-1].fields if known else None


def _next(levels: Sequence[Protected], at_us: int | None) -> Mapping[str, Any] | None:
    known = [one for one in levels if at_us is not None and one.at_us >= at_us]
    return known[0].fields if known else None


def _seconds(parts_us: Mapping[Part, int]) -> Mapping[str, float]:
    return {part.value: taken_us / _SECOND for part, taken_us in parts_us.items()}
