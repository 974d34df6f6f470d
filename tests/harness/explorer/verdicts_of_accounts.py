# SPDX-License-Identifier: Apache-2.0
"""What the oracle demands of the account of a job: it adds up, and recoveries to their outages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from megatron_moevement.policy.accounting.account import (
    JobAccount,
    account_of,
    job_of_histories,
    spans_of,
)
from megatron_moevement.policy.accounting.event import EventName, EventRecord
from megatron_moevement.policy.accounting.job import Job
from megatron_moevement.policy.accounting.life import Life
from megatron_moevement.policy.accounting.parts import RECOVERY, Part, Span, totals_us, within
from megatron_moevement.policy.accounting.steps import microseconds
from megatron_moevement.runtime.observation.events import histories_in
from tests.harness.explorer.outcome import Outcome
from tests.harness.explorer.scenario import Scenario
from tests.harness.explorer.timeline import Timeline

_TOLERATED = 0.01
_IN_AN_OUTAGE = {*RECOVERY, Part.LOST, Part.SAVE, Part.EVALUATION}
"""A fault may strike in a pause, which began with the end of a step, too."""
_BEFORE_IT_IS_NOTICED = {*_IN_AN_OUTAGE, Part.BETWEEN, Part.ENDING}
"""A process reports the step that it has made, or is at its end, while another one is lost."""


def check_account(scenario: Scenario, outcome: Outcome, timeline: Timeline) -> Iterator[str]:
    """Checks that the time of every process is accounted for, and each recovery's by its parts."""
    del scenario, timeline
    folders = [launch.event_dir for launch in outcome.launches if launch.event_dir.exists()]
    ends = [dict(zip(launch.pids, launch.exit_codes, strict=True)) for launch in outcome.launches]
    yield from complaints_of(folders, ends)


def complaints_of(event_dirs: Iterable[Path], ends: Sequence[Mapping[int, int]]) -> Iterator[str]:
    """Yields what is wrong with the account of a job.

    Args:
        event_dirs: of its launches.
        ends: of each launch the exit codes of its processes, by process id.
    """
    histories = {name: read for folder in event_dirs for name, read in histories_in(folder).items()}
    account = account_of(histories)
    if account is None:
        yield "there are no events"
        return
    yield from _sums(account)
    job = job_of_histories(histories)
    yield from _ends(ends, job)
    for number in job.processes:
        spans = spans_of(job, number, histories)
        for index, launch in enumerate(job.launches):
            if number in launch.lives and launch.lives[number].name in histories:
                records = list(histories[launch.lives[number].name]())
                started = _start_up(launch.lives[number], records, spans)
                for complaint in chain(started, _recoveries(records, spans)):
                    yield f"launch {index}: process {number}: {complaint}"


def _ends(ends: Sequence[Mapping[int, int]], job: Job) -> Iterator[str]:
    """Checks that every process of every launch is there, with its exit code."""
    if len(job.launches) != len(ends):
        yield f"{len(job.launches)} launches are accounted for, there were {len(ends)}"
        return
    for index, (ended, found) in enumerate(zip(ends, job.launches, strict=True)):
        told = {life.pid: life.code for life in found.lives.values()}
        if told != ended:
            yield f"launch {index}: processes ended with {ended}, the account says {told}"


def _sums(account: JobAccount) -> Iterator[str]:
    if not account.steps and any(life.code == 0 for one in account.processes for life in one.lives):
        yield "the job has come to its end without a step"
    for one in account.processes:
        total_us, unexplained_us = sum(one.parts_us.values()), one.parts_us.get(Part.UNEXPLAINED, 0)
        if total_us != account.wall_us:
            yield f"process {one.process}: {total_us} us are accounted for, of {account.wall_us}"
        if unexplained_us > _TOLERATED * account.wall_us:
            yield f"process {one.process}: {unexplained_us / 1e6:.3f} s are not explained"


def _start_up(life: Life, records: list[EventRecord], spans: list[Span]) -> Iterator[str]:
    """Checks that a process that trains has started."""
    steps = [one for one in records if one.event is EventName.ITERATION]
    if not steps:
        return
    first_us = microseconds(steps[0].time)
    after_us = totals_us(within(spans, first_us, life.until_us)).get(Part.START_UP, 0)
    if after_us:
        yield f"{after_us} us of start-up come after the first step"


def _recoveries(records: list[EventRecord], spans: list[Span]) -> Iterator[str]:
    """Compares each recovery of a survivor with its outage by the clock, by both accounts."""
    faults = {one.generation: one for one in records if one.event is EventName.FAULT_DETECTED}
    for record in records:
        fault = faults.get(record.generation)
        if record.event is not EventName.RECOVERED:
            continue
        if fault is None:
            phases = [one for one in records if one.event is EventName.PHASE]
            if any(one.generation < record.generation for one in phases):
                yield f"generation {record.generation} recovered, and no fault was detected"
            continue
        if fault.fields["last_step_s"] is None:
            continue
        start_us = microseconds(fault.fields["last_step_s"])
        end_us = microseconds(record.fields["rejoined_s"])
        outage_s = (end_us - start_us) / 1e6
        told_s = sum(record.fields["breakdown_s"].values())
        if abs(told_s - outage_s) > _TOLERATED * outage_s:
            parts = record.fields["breakdown_s"]
            yield f"an outage took {outage_s:.3f} s, its parts {told_s:.3f} s: {parts}"
        noticed_us = min(max(microseconds(fault.fields["noticed_s"]), start_us), end_us)
        strange = Counter[str]()
        for since, until, expected in (
            (start_us, noticed_us, _BEFORE_IT_IS_NOTICED),
            (noticed_us, end_us, _IN_AN_OUTAGE),
        ):
            parts_us = totals_us(within(spans, since, until))
            strange.update({one.value: us for one, us in parts_us.items() if one not in expected})
        if sum(strange.values()) > _TOLERATED * outage_s * 1e6:
            told = dict(strange)
            yield f"of an outage of {outage_s:.3f} s these microseconds are no recovery: {told}"
