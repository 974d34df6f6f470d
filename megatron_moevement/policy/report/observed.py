# SPDX-License-Identifier: Apache-2.0
"""What the events of a run come to besides its time: curves, restarts, protection, incidents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron_moevement.policy.accounting.event import EventName, EventRecord
from megatron_moevement.policy.accounting.steps import losses_of, microseconds
from megatron_moevement.policy.report.curve import Curve
from megatron_moevement.policy.report.restart import Restart

NOTES = 400
"""So many occasional events are listed; more are counted."""
_SUMS = ("duration_s", "stall_s", "captured_bytes", "replicated_bytes", "log_bytes")
_NEWEST = ("grad_norm", "host_bytes")
"""Fields of an iteration that become a curve each, besides its loss."""
_NOTED = {
    EventName.CHECKPOINT_SAVED: (),
    EventName.CHECKPOINT_FAILED: ("reason",),
    EventName.REPLAY_DIFFERED: ("consequence", "proof"),
    EventName.HOLDERS_CHANGED: ("former", "holders"),
    EventName.SLOT_DAMAGED: ("owner", "parts"),
    EventName.SLOW_RANK: ("rank", "own_s", "median_s"),
    EventName.SCHEDULE: ("version", "first_step", "window"),
}
"""Occasional events, and what of each is listed."""


class Place(NamedTuple):
    """The process whose events are read: index of its launch, and its number there."""

    launch: int
    process: int


class Injected(NamedTuple):
    """A fault that was asked for."""

    at_us: int
    place: Place
    rank: int
    step: int
    kind: str
    where: str | None


class Protected(NamedTuple):
    """A level of protection from a time on; microseconds since the epoch."""

    at_us: int
    step: int
    fields: Mapping[str, Any]


class Observed:
    """Reads the events of one process after the other; what it keeps is bounded by what happens."""

    def __init__(self) -> None:
        """Has read nothing."""
        self.curves: dict[str, Curve] = defaultdict(Curve)
        self.restarts: dict[tuple[int, int], Restart] = defaultdict(Restart)
        self.injected: list[Injected] = []
        self.popularity: dict[str, Any] = {}
        self._protected: dict[tuple[int, int, int], Protected] = {}
        self._schedules: dict[int, Mapping[str, Any]] = {}
        self._chosen: dict[int, Mapping[str, Any]] = {}
        self._losses: dict[tuple[str, bool], dict[int, Any]] = defaultdict(dict)
        self._orders: set[int] = set()
        self._broken: dict[int, str] = {}
        self._notes: dict[tuple[Any, ...], Mapping[str, Any]] = {}

    @property
    def protected(self) -> list[Protected]:
        """Levels of protection, in the order of time."""
        return sorted(self._protected.values(), key=lambda one: (one.at_us, one.step))

    def take(self, record: EventRecord, place: Place) -> None:
        """Takes in an event."""
        readers = {
            EventName.ITERATION: self._step,
            EventName.LOSSES: self._read_losses,
            EventName.WINDOW_PERSISTED: self._persist,
            EventName.PROTECTION: self._protect,
            EventName.FAULT_INJECTED: self._inject,
            EventName.EVALUATION: self._evaluate,
            EventName.SCHEDULE: self._schedule,
            EventName.WINDOW_CHOSEN: self._choose,
            EventName.POPULARITY: self._count,
        }
        if record.event in readers:
            readers[record.event](record, place)
        if record.event is not EventName.ITERATION:
            self.restarts[place.launch, record.generation].take(record)
            self._note(record, place)

    def document(self) -> dict[str, Any]:
        """Returns all but restarts, faults and protection, whose times a report relates."""
        found = {name: curve.document() for name, curve in self.curves.items()}
        return {
            "curves": {name: one for name, one in found.items() if one is not None},
            "evaluations": [
                {"split": split, "is_final": final, "points": sorted(losses.items())}
                for (split, final), losses in sorted(self._losses.items())
            ],
            "schedules": [self._schedules[version] for version in sorted(self._schedules)],
            "chosen": [self._chosen[step] for step in sorted(self._chosen)],
            "popularity": {**self.popularity, "orders": sorted(self._orders)},
            "broken_steps": sorted(self._broken.items())[:NOTES],
        }

    def notes(self) -> list[Mapping[str, Any]]:
        """Returns occasional events, in the order of time; the first ones where there are many."""
        return sorted(self._notes.values(), key=lambda one: float(one["time"]))

    def _persist(self, record: EventRecord, _: Place) -> None:
        for name in ("copies", "lag", "size"):
            self.curves[name].add(record.iteration, record.fields.get(name), record.logical_rank)

    def _protect(self, record: EventRecord, place: Place) -> None:
        """Takes in a level of protection; the ranks record the same, one after the other."""
        key = (place.launch, record.generation, record.iteration)
        found = Protected(microseconds(record.time), record.iteration, record.fields)
        self._protected[key] = min(found, self._protected.get(key, found), key=lambda one: one[0])

    def _inject(self, record: EventRecord, place: Place) -> None:
        where = record.fields.get("place")
        what = (record.iteration, str(record.fields["kind"]), where)
        self.injected.append(Injected(microseconds(record.time), place, record.logical_rank, *what))

    def _evaluate(self, record: EventRecord, _: Place) -> None:
        fields = record.fields
        losses = self._losses[fields["split"], bool(fields.get("is_final"))]
        losses[record.iteration] = fields["loss"]

    def _schedule(self, record: EventRecord, _: Place) -> None:
        fields = record.fields
        self._schedules[fields["version"]] = {"step": record.iteration, **fields}

    def _choose(self, record: EventRecord, _: Place) -> None:
        self._chosen.setdefault(record.iteration, {"step": record.iteration, **record.fields})

    def _read_losses(self, record: EventRecord, _: Place) -> None:
        """Takes in the losses of steps, also those that are recorded again before a recovery."""
        losses = losses_of(record.fields)
        for at, loss in enumerate(losses, record.iteration - len(losses) + 1):
            self.curves["loss"].add(at, loss, record.logical_rank)
            if isinstance(loss, str):
                self._broken[at] = f"loss {loss}"

    def _step(self, record: EventRecord, place: Place) -> None:
        """Takes in a step, or several for which one event stands: then a sum is that of all."""
        fields, step, rank = record.fields, record.iteration, record.logical_rank
        steps = max(1, int(fields.get("steps") or 1))
        for name in _SUMS:
            if name in fields:
                self.curves[name].add(step, fields[name] / steps, rank)
        for name in _NEWEST:
            self.curves[name].add(step, fields.get(name), rank)
        self._read_losses(record, place)
        self._rates(fields, step, rank)
        if fields.get("skipped"):
            self._broken[step] = "skipped for overflow"

    def _rates(self, fields: Mapping[str, Any], step: int, rank: int) -> None:
        """Takes in how fast the slots of steps came to the host, and to the slowest holder."""
        spent_s = float(fields.get("copy_s") or 0.0) + float(fields.get("hash_s") or 0.0)
        if spent_s > 0 and fields.get("captured_bytes"):
            self.curves["to_host"].add(step, fields["captured_bytes"] / spent_s, rank)
        holders = fields.get("send_s") or {}
        slowest_s = max(map(float, holders.values()), default=0.0)
        if slowest_s > 0 and fields.get("replicated_bytes"):
            each = fields["replicated_bytes"] / len(holders)
            self.curves["to_holder"].add(step, each / slowest_s, rank)

    def _count(self, record: EventRecord, _: Place) -> None:
        """Takes in what is known of experts; one rank records how often each of them is used."""
        fields = record.fields
        if fields.get("asks_for_order"):
            self._orders.add(record.iteration)
        if fields.get("scores") and record.iteration >= self.popularity.get("step", 0):
            self.popularity = {
                "step": record.iteration,
                "ordering": fields["ordering"],
                "experts": fields["experts"],
                "scores": fields["scores"],
            }

    def _note(self, record: EventRecord, place: Place) -> None:
        """Lists an occasional event, once for all ranks that record the same of a step."""
        named = _NOTED.get(record.event)
        found = {name: record.fields[name] for name in named or () if name in record.fields}
        if record.event is EventName.AUDIT and record.fields.get("differences"):
            found = {"differences": len(record.fields["differences"])}
        elif named is None:
            return
        key = (place.launch, record.generation, record.iteration, record.event, str(found))
        if key not in self._notes and len(self._notes) < NOTES:
            self._notes[key] = {
                "time": record.time,
                "event": record.event.value,
                "step": record.iteration,
                "rank": record.logical_rank,
                **found,
            }
