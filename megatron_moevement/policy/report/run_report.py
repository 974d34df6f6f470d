# SPDX-License-Identifier: Apache-2.0
"""The report of a run as one document: its account, timeline, incidents and curves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_moevement.policy.accounting.account import (
    JobAccount,
    account_of,
    job_of_histories,
    spans_of,
)
from megatron_moevement.policy.accounting.event import History
from megatron_moevement.policy.accounting.job import Job, Launch
from megatron_moevement.policy.accounting.life import Life
from megatron_moevement.policy.accounting.parts import RECOVERY, Part
from megatron_moevement.policy.facts.facts import Facts
from megatron_moevement.policy.job.ranks import Layout
from megatron_moevement.policy.report.casualties import Describe, how_it_ended
from megatron_moevement.policy.report.holders import holders_document, placements_document
from megatron_moevement.policy.report.incidents import Clock, casualty_document, incidents_of
from megatron_moevement.policy.report.observed import Observed, Place
from megatron_moevement.policy.report.timeline import PARTS, SPANS, encoded

_SECOND = 1e6
_GROUPS = {
    **dict.fromkeys(RECOVERY, "recovery"),
    **dict.fromkeys((Part.USEFUL, Part.STALL, Part.BETWEEN), "training"),
    **dict.fromkeys((Part.SAVE, Part.EVALUATION), "saves"),
    Part.LOST: "lost",
}
"""Of the other parts: `rest`."""


def report_of(
    histories: Mapping[str, History],
    facts: Iterable[tuple[int, Facts]],
    describe: Describe,
) -> dict[str, Any] | None:
    """Returns the report of a run; None where there is no event.

    Each history is read a few times and never held whole. Times are in seconds from the begin of
    the first launch, unless a name ends otherwise.

    Args:
        histories: of all processes of all launches, by name.
        facts: that recoveries were planned from, each with its time in microseconds since the
            epoch, in the order of time.
        describe: how a process ended, by its exit code.
    """
    account = account_of(histories)
    if account is None:
        return None
    job = job_of_histories(histories)
    observed = _observed(job, histories)
    incidents = incidents_of(job, account, observed, describe)
    last_us = max((one.end_us or 0 for one in account.outages), default=job.begun_us)
    ending = dict(how_it_ended(job, last_us, describe))
    clock = Clock(job.begun_us)
    ending["casualties"] = [casualty_document(one, clock) for one in ending["casualties"]]
    known = [(clock(at_us) or 0.0, each) for at_us, each in facts]
    layout = _layout(known, incidents)
    return {
        "begun_s": job.begun_us / _SECOND,
        "runs": sorted({life.run_id for life in _lives(job) if life.run_id is not None}),
        "layout": layout,
        "parts": [{"name": part.value, "group": _GROUPS.get(part, "rest")} for part in PARTS],
        "account": _account(account),
        "launches": [_launch(one, clock) for one in job.launches],
        "ending": ending,
        "incidents": incidents,
        "timeline": _timeline(job, account, histories, clock),
        "placements": placements_document(known),
        "protection": [
            {"at": clock(one.at_us), "step": one.step, **one.fields} for one in observed.protected
        ],
        "notes": [
            {**note, "time": clock(round(note["time"] * _SECOND))} for note in observed.notes()
        ],
        **observed.document(),
    }


def _lives(job: Job) -> Iterable[Life]:
    return (life for launch in job.launches for life in launch.lives.values())


def _launch(launch: Launch, clock: Clock) -> Mapping[str, Any]:
    first = next(iter(launch.lives.values()), None)
    return {
        "name": None if first is None else first.launch,
        "start": clock(launch.begun_us),
        "end": clock(launch.until_us),
        "processes": len(launch.lives),
        "slurm_job": None if first is None else first.slurm_job,
    }


def _observed(job: Job, histories: Mapping[str, History]) -> Observed:
    places = {
        life.name: Place(index, number)
        for index, launch in enumerate(job.launches)
        for number, life in launch.lives.items()
    }
    observed = Observed()
    for name, read in histories.items():
        if name in places:  # else it has the ends of others alone
            for record in read():
                observed.take(record, places[name])
    return observed


def _layout(
    facts: Iterable[tuple[float, Facts]], incidents: Sequence[dict[str, Any]]
) -> Mapping[str, int] | None:
    """Gives each incident the holders of its facts; returns the layout, None where none has it."""
    layout: Layout | None = None
    for at_s, each in facts:
        layout = each.layout
        of = [one for one in incidents if one["end"] is None or at_s <= one["end"]]
        if of and at_s >= of[0]["start"]:
            of[0]["holders"] = holders_document(each)
    if layout is None:
        return None
    sizes = {name: getattr(layout, name) for name in ("pp", "dp", "tp", "cp", "ep", "chunks")}
    return {**sizes, "ranks_per_stage": layout.ranks_per_stage}


def _account(account: JobAccount) -> Mapping[str, Any]:
    document = account.document()
    del document["outages"], document["processes"]
    processes = [
        {"process": one.process, "parts_s": _seconds(one.parts_us)} for one in account.processes
    ]
    return {**document, "processes": processes}


def _timeline(
    job: Job, account: JobAccount, histories: Mapping[str, History], clock: Clock
) -> Sequence[Mapping[str, Any]]:
    """Returns a row for each process: what each moment was, and its life in each launch."""
    limit = max(SPANS // len(account.processes), 1)
    return [
        {
            "process": one.process,
            "lives": [_life(index, life, clock) for index, life in _numbered(job, one.process)],
            **encoded(spans_of(job, one.process, histories), limit),
        }
        for one in account.processes
    ]


def _numbered(job: Job, process: int) -> Iterable[tuple[int, Life]]:
    for index, launch in enumerate(job.launches):
        if process in launch.lives:
            yield index, launch.lives[process]


def _life(index: int, life: Life, clock: Clock) -> Mapping[str, Any]:
    return {
        "launch": index,
        "host": life.host,
        "pid": life.pid,
        "ranks": life.ranks,
        "start": clock(life.begun_us),
        "end": clock(life.ended_us),
        "code": life.code,
    }


def _seconds(parts_us: Mapping[Part, int]) -> Mapping[str, float]:
    return {part.value: taken_us / _SECOND for part, taken_us in parts_us.items()}
