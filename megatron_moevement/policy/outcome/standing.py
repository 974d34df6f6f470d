# SPDX-License-Identifier: Apache-2.0
"""How a job stands, from its events as they come: a bounded summary of all of them."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_moevement.policy.accounting.event import EventName, EventRecord
from megatron_moevement.policy.accounting.steps import Steps
from megatron_moevement.policy.copies.protection_level import ProtectionLevel
from megatron_moevement.policy.outcome.latest import Latest
from megatron_moevement.policy.outcome.metrics import Figure, Metric
from megatron_moevement.policy.outcome.recoveries import is_of_same, recovery_of
from megatron_moevement.policy.recovery.lifecycle import Phase
from megatron_moevement.policy.recovery.plan import Verdict

_SECOND = 1e6
_MOST_INTERVALS = 4096
"""Of which it is known what steps they had, for a rollback; older ones count as kept."""


@dataclasses.dataclass(frozen=True)
class RankStanding:
    """What one rank recorded last of its steps.

    Attributes:
        stall_s: of a step.
        capture_bytes_per_s: None where nothing was captured.
        replication_bytes_per_s: None where nothing was sent.
    """

    host_bytes: int
    stall_s: float
    capture_bytes_per_s: float | None
    replication_bytes_per_s: float | None

    @classmethod
    def of_event(cls, record: EventRecord, steps: Steps) -> RankStanding:
        """Reads an event of iterations, and of its steps."""
        fields = record.fields
        sends = fields.get("send_s") or {}
        return cls(
            host_bytes=int(fields.get("host_bytes", 0)),
            stall_s=steps.stall_us / _SECOND / steps.number,
            capture_bytes_per_s=_rate(fields.get("captured_bytes"), fields.get("copy_s")),
            replication_bytes_per_s=_rate(fields.get("replicated_bytes"), sum(sends.values())),
        )


def _rate(size_bytes: float | None, took_s: float | None) -> float | None:
    return size_bytes / took_s if size_bytes and took_s else None


class Standing:
    """How a job stands; it takes each event once, in about the order of time."""

    def __init__(self) -> None:
        self._figures: dict[Metric, float] = {}
        """Figures of metrics without a label, as some event has them."""
        self._begun_s: float | None = None
        self._latest = Latest()
        self._has_ended_well = False
        self._joined: set[int] = set()
        self._ranks: dict[int, RankStanding] = {}
        self._level: str | None = None
        self._verdicts: Counter[Verdict] = Counter()
        self._told: dict[int, EventRecord] = {}
        """Of the newest recovery, by rank."""
        self._launches = self._faults = 0
        self._is_recovering = False
        self._trained: deque[tuple[Steps, int]] = deque()
        self._useful_us = 0

    def take(self, record: EventRecord) -> None:
        """Takes an event."""
        event, fields = record.event, record.fields
        self._begin(fields.get("started_s", record.time))
        launch, generation = self._latest.launch, self._latest.generation
        is_latest = self._latest.take(record, "all of them, by time")
        if self._latest.launch != launch:
            self._launched()
        elif event is EventName.PROCESS_END:
            self._has_ended_well |= fields.get("code") == 0
        if record.logical_rank < 0:
            return
        self._join(record, generation)
        if event is EventName.ITERATION:
            self._step(record, is_latest=is_latest)
        elif event is EventName.PHASE and fields["phase"] == Phase.TRAINING.value:
            self._is_recovering = False
        elif event is EventName.WINDOW_PERSISTED:
            self._figures |= {
                Metric.WINDOW: float(fields["size"]),
                Metric.PERSISTED_STEP: float(fields["start"] + fields["size"] - 1),
                Metric.LAG: float(fields["lag"]),
                Metric.COPIES: float(fields["copies"]),
            }
        elif event is EventName.PROTECTION:
            self._protected(fields)
        elif event is EventName.CHECKPOINT_SAVED:
            self._figures[Metric.CHECKPOINT_STEP] = record.iteration
        elif event is EventName.RECOVERED:
            self._recovered(record)

    def figures(self, now_s: float) -> Iterator[Figure]:
        """Yields the figures of a moment, in seconds since the epoch; what is not known is not."""
        for metric, value in self._figures.items():
            yield Figure(metric, value)
        if self._begun_s is None:
            return
        since_us = max(now_s - self._begun_s, 0.0) * _SECOND
        useful_us = self._useful_us + sum(useful_us for _, useful_us in self._trained)
        yield Figure(Metric.ETTR, min(useful_us / since_us, 1.0) if since_us else 0.0)
        yield Figure(Metric.LAUNCHES, self._launches)
        yield Figure(Metric.GENERATION, self._latest.generation)
        yield Figure(Metric.RANKS, len(self._joined))
        yield Figure(Metric.FAULTS, self._faults)
        yield Figure(Metric.RECOVERING, float(self._is_recovering))
        for level in ProtectionLevel if self._level is not None else ():
            yield Figure(Metric.PROTECTION, float(level.value == self._level), level.value)
        for verdict in Verdict:
            yield Figure(Metric.RECOVERIES, self._verdicts[verdict], verdict.value)
        if self._told:
            for part, took_s in recovery_of([*self._told.values()]).breakdown_s.items():
                yield Figure(Metric.RECOVERY, took_s, part)
        yield from self._figures_of_ranks()

    def _figures_of_ranks(self) -> Iterator[Figure]:
        ranks = self._ranks.values()
        if not ranks:
            return
        yield Figure(Metric.HOST_BYTES, sum(one.host_bytes for one in ranks))
        yield Figure(Metric.MOST_HOST_BYTES, max(one.host_bytes for one in ranks))
        yield Figure(Metric.STALL, max(one.stall_s for one in ranks))
        for metric, rates in (
            (Metric.CAPTURE, [one.capture_bytes_per_s for one in ranks]),
            (Metric.REPLICATION, [one.replication_bytes_per_s for one in ranks]),
        ):
            known = [rate for rate in rates if rate is not None]
            if known:
                yield Figure(metric, min(known))

    def _begin(self, time_s: float | None) -> None:
        if time_s is not None:
            self._begun_s = min(time_s, time_s if self._begun_s is None else self._begun_s)

    def _launched(self) -> None:
        """Reads that a process runs, the first of a new launch."""
        self._faults += bool(self._launches) and not self._has_ended_well
        self._launches += 1
        self._has_ended_well = False
        self._joined, self._ranks = set(), {}

    def _join(self, record: EventRecord, former: int) -> None:
        """Reads in which generation a rank is, and how many there were since the former one."""
        generation = self._latest.generation
        if generation > former:
            self._faults += generation - former
            self._joined = set()
            self._is_recovering = True
        if record.generation == generation:
            self._joined.add(record.logical_rank)

    def _step(self, record: EventRecord, *, is_latest: bool) -> None:
        steps = Steps.of_event(record)
        self._ranks[record.logical_rank] = RankStanding.of_event(record, steps)
        if is_latest:
            self._figures[Metric.COMMITTED_STEP] = record.iteration
            self._figures[Metric.LAST_STEP] = steps.ended_us / _SECOND
        if record.logical_rank or record.generation != self._latest.generation:
            return
        self._figures[Metric.ITERATION] = steps.mean_us / _SECOND
        if "loss" in record.fields:
            self._figures[Metric.LOSS] = float(record.fields["loss"])
        self._train(steps)

    def _train(self, steps: Steps) -> None:
        """Counts the time of steps; that of former ones from the same step on was lost."""
        while self._trained and self._trained[-1][0].last >= steps.first:
            former, useful_us = self._trained.pop()
            kept = former.before(steps.first)
            if kept:
                cut = dataclasses.replace(former, last=former.first + kept - 1)
                self._trained.append((cut, useful_us * kept // former.number))
                break
        self._trained.append((steps, max(0, steps.duration_us - steps.stall_us)))
        if len(self._trained) > _MOST_INTERVALS:
            self._useful_us += self._trained.popleft()[1]

    def _protected(self, fields: Mapping[str, Any]) -> None:
        copies, wanted, spares = (fields[name] for name in ("copies", "wanted", "spares"))
        self._figures |= {
            Metric.COPIES: float(copies),
            Metric.COPIES_WANTED: float(wanted),
        }
        self._figures.pop(Metric.SPARES, None)
        if spares is not None:
            self._figures[Metric.SPARES] = float(spares)
        self._level = str(fields["level"])

    def _recovered(self, record: EventRecord) -> None:
        recovery = recovery_of([record])
        if not self._told or not is_of_same(self._told, record):
            self._told = {}
            self._verdicts[recovery.verdict] += 1
        self._told[record.logical_rank] = record
