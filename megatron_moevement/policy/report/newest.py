# SPDX-License-Identifier: Apache-2.0
"""The newest of a run that goes on: how far it is, what each process does, what it lost last."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_moevement.policy.accounting.event import EventName, EventRecord
from megatron_moevement.policy.accounting.life import End
from megatron_moevement.policy.outcome.latest import Latest
from megatron_moevement.policy.report.casualties import Casualty, Describe, summary
from megatron_moevement.policy.report.restart import Restart

_STEPS = 20
"""So many of the newest steps have their times averaged."""
_RESTARTS = 6
"""So many of the newest restarts are kept."""


@dataclasses.dataclass
class WatchedProcess:
    """What one process does, by its newest event; times are seconds since the epoch.

    Attributes:
        number: in its launch; None where an older build wrote its events.
        rank: -1 without a place.
        doing: its phase, or what came last.
        code: with which it ended; None before that.
    """

    launch: str | None = None
    generation: int = 0
    number: int | None = None
    host: str | None = None
    rank: int = -1
    step: int = 0
    doing: str = "starting"
    time_s: float = 0.0
    code: int | None = None
    host_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class WatchedRestart:
    """A restart, as far as it has come, and when the first process recorded it."""

    restart: Restart
    time_s: float
    launch: str | None
    generation: int


class Newest:
    """Reads events as they come; reading old ones again does no harm."""

    def __init__(self) -> None:
        """Has read nothing."""
        self.processes: dict[str, WatchedProcess] = {}
        self.run_id: str | None = None
        self.latest = Latest()
        self.time_s = 0.0
        self.step_fields: Mapping[str, Any] = {}
        self._durations_s: deque[float] = deque(maxlen=_STEPS)
        self._restarts: dict[tuple[str | None, int], WatchedRestart] = {}
        self._ends: dict[tuple[str | None, int], int] = {}

    @property
    def duration_s(self) -> float | None:
        """Mean time of the newest steps; None before any."""
        count = len(self._durations_s)
        return sum(self._durations_s) / count if count else None

    @property
    def restarts(self) -> Sequence[WatchedRestart]:
        """The newest ones, the newest first."""
        return sorted(self._restarts.values(), key=lambda one: -one.time_s)

    def take(self, name: str, record: EventRecord) -> None:
        """Takes in an event of the process whose events have a name."""
        end = End.of_event(record)
        if end is not None:
            self._ends[end.launch, end.process] = end.code
            return
        process = self.processes.setdefault(name, WatchedProcess())
        self._follow(process, record)
        self.time_s = max(self.time_s, record.time)
        before = self.latest.step
        is_latest = self.latest.take(record, name)
        if record.event is EventName.ITERATION:
            process.step = max(process.step, record.iteration)
            process.host_bytes = int(record.fields.get("host_bytes") or 0)
            if is_latest:
                self._step(record.fields, is_new=record.iteration != before)
        elif record.event in {EventName.FAULT_DETECTED, EventName.PLAN, EventName.RECOVERED}:
            self._restart(process, record)

    def living(self) -> list[WatchedProcess]:
        """Returns the processes of the newest launch, by rank; spares last."""
        found = [one for one in self.processes.values() if one.launch == self.latest.launch]
        for one in found:
            if one.number is not None and one.code is None:
                one.code = self._ends.get((self.latest.launch, one.number))
        return sorted(found, key=lambda one: (one.rank < 0, one.rank, one.number or 0))

    def loss_before(self, watched: WatchedRestart, describe: Describe) -> str:
        """Returns who was lost before a restart, in words."""
        found = [
            Casualty(
                process=int(loss["process"]),
                rank=loss["rank"],
                host=loss["host"],
                end=None if code is None else describe(code),
                reason=loss["reason"],
            )
            for loss in watched.restart.losses.values()
            for code in [self._ends.get((watched.launch, int(loss["process"])))]
        ]
        return summary(found) or "a loss that no process named"

    def _follow(self, process: WatchedProcess, record: EventRecord) -> None:
        fields = record.fields
        if record.event is EventName.LAUNCHED:
            process.launch, process.host = str(fields.get("launch") or ""), fields.get("host")
            process.number = fields.get("process")
        if record.time < process.time_s:
            return
        process.time_s = record.time
        process.rank = max(process.rank, record.logical_rank)
        process.generation = max(process.generation, record.generation)
        if record.event is EventName.PHASE:
            process.doing = str(fields["phase"])
        elif record.event is EventName.SPARE:
            process.doing = "spare"
        elif record.event is EventName.PROCESS_START:
            self.run_id = fields.get("run_id") or self.run_id
        elif record.event is EventName.PROCESS_END:
            process.code = fields.get("code")

    def _step(self, fields: Mapping[str, Any], *, is_new: bool) -> None:
        if is_new:
            self._durations_s.append(
                float(fields.get("duration_s") or 0.0) / max(1, int(fields.get("steps") or 1))
            )
        shared = {name: fields[name] for name in ("loss", "grad_norm") if name in fields}
        self.step_fields = {**self.step_fields, **shared}

    def _restart(self, process: WatchedProcess, record: EventRecord) -> None:
        if not record.generation:
            return
        key = (process.launch, record.generation)
        if key not in self._restarts:
            self._restarts[key] = WatchedRestart(Restart(), record.time, *key)
        self._restarts[key].restart.take(record)
        if len(self._restarts) > _RESTARTS:
            del self._restarts[min(self._restarts, key=lambda one: self._restarts[one].time_s)]
