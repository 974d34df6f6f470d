# SPDX-License-Identifier: Apache-2.0
"""The account of a job: the time of each process by parts, and what it comes to.

A process is counted from the start of the first launch to the end of the last one, under its number
in each of them. Every second of that is of exactly one part, so the parts add up to the whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_moevement.policy.accounting.claims import Claims
from megatron_moevement.policy.accounting.event import EventRecord, History
from megatron_moevement.policy.accounting.job import Job, Outage, job_of
from megatron_moevement.policy.accounting.life import Life, ends_of, life_of
from megatron_moevement.policy.accounting.parts import (
    Claim,
    Layer,
    Part,
    Span,
    partition,
    totals_us,
    within,
)

_SECOND = 1e6


@dataclasses.dataclass(frozen=True)
class ProcessAccount:
    """The time of one process over all launches.

    Attributes:
        process: its number in each launch.
        lives: of its launches, in the order of time.
        parts_us: how long each part took, in microseconds; they add up to that of the job.
        outages_us: the same of each outage of the job, in their order.
    """

    process: int
    lives: Sequence[Life]
    parts_us: Mapping[Part, int]
    outages_us: Sequence[Mapping[Part, int]]


@dataclasses.dataclass(frozen=True)
class JobAccount:
    """The time of all processes of a job, and what it comes to.

    Attributes:
        begun_us: start of the first launch, in microseconds since the epoch.
        wall_us: from then to the end of the last launch.
        launches: how many there were.
        ranks: that train at one time.
        steps: that the job has at its end and has trained in these launches.
        processes: each with its time.
        outages: in the order of time.
        was_lost: whether the newest launch ended because processes were lost.
    """

    begun_us: int
    wall_us: int
    launches: int
    ranks: int
    steps: int
    processes: Sequence[ProcessAccount]
    outages: Sequence[Outage]
    was_lost: bool

    @property
    def parts_us(self) -> Mapping[Part, int]:
        """How long each part took, of all processes together."""
        sums = dict.fromkeys(Part, 0)
        for process in self.processes:
            for part, taken_us in process.parts_us.items():
                sums[part] += taken_us
        return {part: total_us for part, total_us in sums.items() if total_us}

    @property
    def effective_training_time_ratio(self) -> float:
        """The share of the time of all ranks in which they trained steps that the job has."""
        whole_us = self.wall_us * self.ranks
        return self.parts_us.get(Part.USEFUL, 0) / whole_us if whole_us else 0.0

    @property
    def goodput_steps_per_s(self) -> float:
        """Steps that the job has, of each second of wall time."""
        return self.steps / (self.wall_us / _SECOND) if self.wall_us else 0.0

    @property
    def faults(self) -> int:
        """Restarts in place, relaunches, and the loss that the newest launch ended with."""
        is_open = any(outage.end_us is None for outage in self.outages)
        return sum(outage.faults for outage in self.outages) + (self.was_lost and not is_open)

    @property
    def time_between_failures_s(self) -> float | None:
        """Mean time between failures as seen: wall time by faults; None without any."""
        return self.wall_us / _SECOND / self.faults if self.faults else None

    @property
    def time_to_recover_s(self) -> float | None:
        """Mean time to recover as seen: of outages that have ended; None without any."""
        ended = [one.end_us - one.start_us for one in self.outages if one.end_us is not None]
        return sum(ended) / len(ended) / _SECOND if ended else None

    def document(self) -> dict[str, Any]:
        """Returns all of it as JSON holds it, times in seconds."""
        return {
            "begun": self.begun_us / _SECOND,
            "wall_s": self.wall_us / _SECOND,
            "launches": self.launches,
            "ranks": self.ranks,
            "steps": self.steps,
            "effective_training_time_ratio": self.effective_training_time_ratio,
            "goodput_steps_per_s": self.goodput_steps_per_s,
            "faults": self.faults,
            "time_between_failures_s": self.time_between_failures_s,
            "time_to_recover_s": self.time_to_recover_s,
            "parts_s": _seconds(self.parts_us),
            "processes": [
                {
                    "process": one.process,
                    "lives": [_life(life) for life in one.lives],
                    "parts_s": _seconds(one.parts_us),
                }
                for one in self.processes
            ],
            "outages": [self._outage(index, outage) for index, outage in enumerate(self.outages)],
        }

    def _outage(self, index: int, outage: Outage) -> dict[str, Any]:
        end_us = outage.end_us
        return {
            "launch": outage.launch,
            "generation": outage.generation,
            "faults": outage.faults,
            "start": outage.start_us / _SECOND,
            "duration_s": None if end_us is None else (end_us - outage.start_us) / _SECOND,
            "processes": {
                str(one.process): _seconds(one.outages_us[index]) for one in self.processes
            },
        }


def account_of(histories: Mapping[str, History]) -> JobAccount | None:
    """Returns the account of a job; None where there is no event.

    Each history is read three times, and never held whole.

    Args:
        histories: of all processes of all launches, by name.
    """
    job = job_of_histories(histories)
    if not job.launches:
        return None
    outages = job.outages()
    processes = [_account_of(job, number, outages, histories) for number in job.processes]
    trained = {rank for launch in job.launches for rank in _training_ranks(launch.lives.values())}
    return JobAccount(
        begun_us=job.begun_us,
        wall_us=job.until_us - job.begun_us,
        launches=len(job.launches),
        ranks=len(trained),
        steps=job.steps(),
        processes=processes,
        outages=outages,
        was_lost=job.launches[-1].was_lost,
    )


def job_of_histories(histories: Mapping[str, History]) -> Job:
    """Returns the job that histories are of; it has no launch where there is no event."""
    lives = [life for name, read in histories.items() if (life := life_of(name, read()))]
    return job_of(lives, [end for read in histories.values() for end in ends_of(read())])


def spans_of(job: Job, number: int, histories: Mapping[str, History]) -> list[Span]:
    """Returns what each moment of a process was, over all launches of its job."""
    claims = [Claim(Layer.JOB, job.begun_us, job.until_us, Part.DOWN)]
    lost_from = job.lost_from()
    for index, launch in enumerate(job.launches):
        claims.append(Claim(Layer.LAUNCH, launch.begun_us, launch.until_us, Part.GONE))
        life = launch.lives.get(number)
        if life is None:
            continue
        lost = {generation: lost_from[index, generation] for generation in life.generations}
        kept = {one: launch.kept_steps(one, lost[one]) for one in life.generations}
        found = Claims(life, launch.deaths_us(), lost, kept)
        claims += found.all_of(_read(histories, life.name))
    return partition(job.begun_us, job.until_us, claims)


def _read(histories: Mapping[str, History], name: str) -> Iterable[EventRecord]:
    """Returns the events of a process; one that was killed at its start has none."""
    return histories[name]() if name in histories else ()


def _account_of(
    job: Job, number: int, outages: Sequence[Outage], histories: Mapping[str, History]
) -> ProcessAccount:
    spans = spans_of(job, number, histories)
    lives = [launch.lives[number] for launch in job.launches if number in launch.lives]
    of_outages = [
        totals_us(within(spans, one.start_us, job.until_us if one.end_us is None else one.end_us))
        for one in outages
    ]
    return ProcessAccount(number, lives, totals_us(spans), of_outages)


def _training_ranks(lives: Iterable[Life]) -> set[int]:
    return {
        rank
        for life in lives
        if any(one.last_step is not None for one in life.generations.values())
        for rank in life.ranks
    }


def _seconds(parts_us: Mapping[Part, int]) -> dict[str, float]:
    return {part.value: taken_us / _SECOND for part, taken_us in parts_us.items()}


def _life(life: Life) -> dict[str, Any]:
    return {
        "launch": life.launch,
        "host": life.host,
        "pid": life.pid,
        "ranks": list(life.ranks),
        "begun": life.begun_us / _SECOND,
        "ended": None if life.ended_us is None else life.ended_us / _SECOND,
        "code": life.code,
        "run_id": life.run_id,
        "slurm_job": life.slurm_job,
    }
