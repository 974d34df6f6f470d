# SPDX-License-Identifier: Apache-2.0
"""Lives: what is to be known of each process before its time can be accounted for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from megatron_moevement.policy.accounting.event import EventName, EventRecord
from megatron_moevement.policy.accounting.steps import Steps, microseconds
from megatron_moevement.policy.recovery.lifecycle import Phase


@dataclasses.dataclass(frozen=True)
class GenerationOfLife:
    """A generation as one process went through it; times are microseconds since the epoch.

    Attributes:
        first_step: that it trained and reported; None for none.
        last_step: the newest one.
        stepped_us: when that ended.
        stopped_us: the end of its last step before the restart; None where it was in none.
        noticed_us: when it learned of the fault.
        trains_us: when it began to train.
        recovered_us: when it had recovered.
    """

    first_step: int | None = None
    last_step: int | None = None
    stepped_us: int | None = None
    stopped_us: int | None = None
    noticed_us: int | None = None
    trains_us: int | None = None
    recovered_us: int | None = None


@dataclasses.dataclass(frozen=True)
class Life:
    """One process of one launch, from its own events.

    Attributes:
        name: of the process among all processes of all launches.
        launch: name of its launch; None where an older build wrote it.
        process: its number in the launch; None where an older build wrote it.
        host: None where an older build wrote it.
        ranks: that it occupied, in the order of time.
        begun_us: its start, else its first event; microseconds since the epoch, as all times are.
        last_us: its last event.
        stepped_us: the end of its newest step; None before any.
        ended_us: when it ended; None where nobody says so.
        code: its exit code, negative for a signal; None where nobody says so.
        generations: by number.
        run_id: of the run; None before it is known.
        slurm_job: None outside of SLURM.
    """

    name: str
    pid: int
    begun_us: int
    last_us: int
    launch: str | None = None
    process: int | None = None
    host: str | None = None
    ranks: tuple[int, ...] = ()
    stepped_us: int | None = None
    ended_us: int | None = None
    code: int | None = None
    generations: Mapping[int, GenerationOfLife] = dataclasses.field(default_factory=dict)
    run_id: str | None = None
    slurm_job: str | None = None

    @property
    def until_us(self) -> int:
        """Its end; where nobody says when that was, its last event."""
        return max(self.last_us, self.ended_us or 0)


@dataclasses.dataclass(frozen=True)
class End:
    """How a process ended, as whoever started it says; microseconds since the epoch.

    Attributes:
        pid: of the process; 0 where it is not known.
    """

    launch: str
    process: int
    host: str
    pid: int
    begun_us: int
    ended_us: int
    code: int

    @classmethod
    def of_event(cls, record: EventRecord) -> End | None:
        """Reads an event; None where it tells of the process that recorded it, or is none."""
        fields = record.fields
        if record.event is not EventName.PROCESS_END or "launch" not in fields:
            return None
        return cls(
            launch=str(fields["launch"]),
            process=int(fields["process"]),
            host=str(fields["host"]),
            pid=int(fields["child"] or 0),
            begun_us=microseconds(fields["started_s"]),
            ended_us=microseconds(record.time),
            code=int(fields["code"]),
        )

    def after(self, life: Life | None) -> Life:
        """Returns the life of the process with this end; one that left no event has only that."""
        if life is None:
            name = f"{self.launch} {self.process}"
            life = Life(
                *(name, self.pid, self.begun_us, self.ended_us),
                launch=self.launch,
                process=self.process,
                host=self.host,
            )
        begun_us = min(life.begun_us, self.begun_us)
        ended_us = max(self.ended_us, life.last_us)
        return dataclasses.replace(life, begun_us=begun_us, ended_us=ended_us, code=self.code)


def ends_of(records: Iterable[EventRecord]) -> list[End]:
    """Returns how processes ended that the recorder of events had started."""
    return [end for record in records if (end := End.of_event(record)) is not None]


def life_of(name: str, records: Iterable[EventRecord]) -> Life | None:
    """Returns the life of a process from its events in their order; None where there are none.

    What it says of the ends of other processes is left out.
    """
    life: Life | None = None
    generations: dict[int, GenerationOfLife] = {}
    ranks: dict[int, None] = {}
    for record in records:
        if End.of_event(record) is not None:
            continue
        now_us = microseconds(record.time)
        if life is None:
            life = Life(name, record.pid, now_us, now_us)
        begun_us = now_us
        if record.event is EventName.ITERATION:
            begun_us = min(begun_us, Steps.of_event(record).began_us)
        elif record.event is EventName.RECOVERED:
            begun_us -= microseconds(record.fields.get("duration_s") or 0.0)
        life = dataclasses.replace(
            life, last_us=max(life.last_us, now_us), begun_us=min(life.begun_us, begun_us)
        )
        life = _knowing(life, record, now_us)
        if record.logical_rank >= 0:
            ranks[record.logical_rank] = None
        known = generations.get(record.generation, GenerationOfLife())
        if record.event not in _OUTSIDE:
            generations[record.generation] = _after(known, record, now_us)
    if life is None:
        return None
    return dataclasses.replace(life, generations=generations, ranks=tuple(ranks))


_OUTSIDE = {EventName.LAUNCHED, EventName.SPARE, EventName.PROCESS_END}
"""What is recorded outside of generations."""


def _knowing(life: Life, record: EventRecord, now_us: int) -> Life:
    """Returns a life with what an event says of the process itself."""
    fields = record.fields
    if record.event is EventName.LAUNCHED:
        started = fields.get("started_s")
        return dataclasses.replace(
            life,
            launch=fields.get("launch"),
            process=fields.get("process"),
            host=fields.get("host"),
            slurm_job=fields.get("slurm_job"),
            begun_us=min(life.begun_us, now_us if started is None else microseconds(started)),
        )
    if record.event is EventName.PROCESS_START:
        return dataclasses.replace(life, run_id=fields.get("run_id"))
    if record.event is EventName.PROCESS_END:
        return dataclasses.replace(life, ended_us=now_us, code=fields.get("code"))
    if record.event is EventName.ITERATION:
        return dataclasses.replace(life, stepped_us=Steps.of_event(record).ended_us)
    return life


def _after(known: GenerationOfLife, record: EventRecord, now_us: int) -> GenerationOfLife:
    fields = record.fields
    if record.event is EventName.ITERATION:
        steps = Steps.of_event(record)
        first = steps.first if known.first_step is None else known.first_step
        return dataclasses.replace(
            known,
            first_step=min(first, steps.first),
            last_step=steps.last,
            stepped_us=steps.ended_us,
        )
    if record.event is EventName.FAULT_DETECTED:
        stopped = fields.get("last_step_s")
        noticed_us = microseconds(fields["noticed_s"])
        return dataclasses.replace(
            known,
            noticed_us=noticed_us,
            stopped_us=None if stopped is None else microseconds(stopped),
        )
    if record.event is EventName.RECOVERED:
        return dataclasses.replace(known, recovered_us=now_us)
    is_training = record.event is EventName.PHASE and fields.get("phase") == Phase.TRAINING.value
    if is_training and known.trains_us is None:
        return dataclasses.replace(known, trains_us=now_us)
    return known
