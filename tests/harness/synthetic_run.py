# SPDX-License-Identifier: Apache-2.0
"""A run that never was: events of many ranks with many faults, as processes would record them.

Times are of a clock that this module turns. What ranks record of a step and of a recovery has the
fields of a real run; who is lost, when, and how long things take is drawn.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from megatron_moevement.policy.accounting.event import EventName, EventRecord
from megatron_moevement.policy.facts.facts import Facts
from megatron_moevement.policy.facts.facts_document import FACTS, dump_facts
from megatron_moevement.policy.job.ranks import Layout
from megatron_moevement.policy.recovery.lifecycle import Phase
from megatron_moevement.policy.window.schedule import Window
from tests.harness.synthetic_facts import facts_of
from tests.harness.synthetic_steps import popularity_fields, step_fields

BEGUN_S = 1_790_000_000.0
WINDOW = 4
_OF_HOST = 4


@dataclasses.dataclass(frozen=True)
class Shape:
    """How large a synthetic run is.

    Attributes:
        faults: of processes while others go on; a launch without a spare left is launched again.
        ends_well: whether the job comes to its last step; else it stops with 75 in front of it.
    """

    layout: Layout = dataclasses.field(default_factory=lambda: Layout(pp=4, dp=2, ep=2))
    spares: int = 4
    steps: int = 1000
    faults: int = 20
    seed: int = 7
    ends_well: bool = True


@dataclasses.dataclass(frozen=True)
class Times:
    """When a recovery came to its parts, in seconds since the epoch."""

    stepped: float
    fault: float
    noticed: float
    entered: float
    joined: float
    built: float
    planned: float
    fetched: float
    replayed: float
    reprotected: float
    ended: float


class SyntheticRun:
    """Draws a run; `write` leaves its events as files."""

    def __init__(self, shape: Shape) -> None:
        """Draws all of it."""
        self.shape = shape
        self.records: dict[tuple[int, int], list[EventRecord]] = defaultdict(list)
        """By launch and process; the launcher is process -1."""
        self.facts: dict[int, Facts] = {}
        """By time, in nanoseconds since the epoch."""
        self._window: Window | None = None
        self._protected: tuple[int, int, int] | None = None
        self._random = Random(shape.seed)  # noqa: S311  (a seed draws a run)
        self._now = BEGUN_S
        self._step = 0
        self._launch, self._generation = -1, 0
        self._launched_s = BEGUN_S
        self._places: dict[int, int] = {}
        self._spares: list[int] = []
        self._draw()

    def write(self, folder: Path) -> None:
        """Writes a file for each process into a new folder."""
        folder.mkdir(parents=True)
        for (launch, process), records in self.records.items():
            path = folder / f"launch{launch}-{process}.jsonl"
            path.write_text("".join(f"{json.dumps(_line(one))}\n" for one in records), "utf-8")
        for at_ns, facts in self.facts.items():
            (folder / f"{at_ns}-99.{FACTS}.json").write_text(dump_facts(facts), "utf-8")

    def _draw(self) -> None:
        shape = self.shape
        every = shape.steps / (shape.faults + 1)
        strikes = [
            max(2, round(every * (number + self._random.uniform(-0.3, 0.3))))
            for number in range(1, shape.faults + 1)
        ]
        self._start(again=False)
        while self._step < shape.steps:
            self._train()
            if strikes and self._step >= strikes[0]:
                strikes.pop(0)
                self._strike(is_last=not strikes)
                if not strikes and not shape.ends_well:
                    return
        for process in (*self._places.values(), *self._spares):
            self._phase(process, Phase.ENDING)
        self._now += 2.0
        for process in (*self._places.values(), *self._spares):
            self._end(process, 0)

    def _host(self, process: int) -> str:
        return f"node{process // _OF_HOST:02d}"

    def _emit(self, process: int, event: EventName, iteration: int = 0, /, **fields: Any) -> None:
        rank = next((rank for rank, one in self._places.items() if one == process), -1)
        at_s = fields.pop("at_s", None) or self._now + 0.0005 * process
        pid = 4000 + 100 * self._launch + process
        record = EventRecord(at_s, rank, pid, self._generation, iteration, event, fields)
        self.records[self._launch, process].append(record)

    def _phase(self, process: int, phase: Phase, at_s: float | None = None) -> None:
        self._emit(process, EventName.PHASE, self._step, phase=phase.value, at_s=at_s)

    def _start(self, *, again: bool) -> None:
        """Launches all processes; those that were launched before recover from host memory."""
        shape = self.shape
        count = shape.layout.num_ranks + shape.spares
        self._launch, self._generation = self._launch + 1, 0
        self._places, self._spares = {}, []
        self._launched_s = self._now - 3.0
        for process in range(count):
            self._emit(
                process,
                EventName.LAUNCHED,
                schema=2,
                launch=f"launch-{self._launch}",
                process=process,
                processes=count,
                host=self._host(process),
                started_s=self._launched_s,
                slurm_job=str(8100 + self._launch),
            )
        self._now += 6.0
        self._places = {rank: rank for rank in range(shape.layout.num_ranks)}
        self._spares = list(range(shape.layout.num_ranks, count))
        for process in self._spares:
            self._emit(process, EventName.SPARE)
        for process in self._places.values():
            self._emit(process, EventName.PROCESS_START, **self._introduction())
            self._phase(process, Phase.PLANNING)
        if again:
            self._recover(self._times(self._now - 8.0, 0), [], range(shape.layout.pp), "GLOBAL")
        else:
            self._publish(self._now, self._places)
            self._now += 3.0
            for process in self._places.values():
                self._phase(process, Phase.LOADING)
        self._now += 1.0
        for process in self._places.values():
            self._phase(process, Phase.TRAINING)

    def _introduction(self) -> Mapping[str, Any]:
        return {"run_id": "synthetic", "entered_s": self._now - 1.0, "joined_s": self._now}

    def _train(self) -> None:
        """Trains one step, and persists a window at its end if one is full."""
        self._step += 1
        duration_s = 1.1 + 0.2 * self._random.random() + 2.5 * (self._random.random() < 0.004)
        self._now += duration_s + 0.02
        for rank, process in self._places.items():
            fields = step_fields(self._step, rank, duration_s, self._now, self._random)
            self._emit(process, EventName.ITERATION, self._step, **fields)
        if self._step % WINDOW == 0 and self._step >= 2 * WINDOW:
            self._persist()
        if self._step % 200 == 0:
            self._evaluate_and_save()

    def _persist(self) -> None:
        self._window = Window(self._step - 2 * WINDOW, WINDOW)
        edge = {"start": self._window.start, "size": WINDOW, "lag": self._step - self._window.last}
        copies = 1 if self._step % 40 < WINDOW else 2
        level = {"level": "full" if copies == 2 else "reduced", "copies": copies, "wanted": 2}
        rest = {"spares": len(self._spares), "costs": [], **edge}
        is_known = self._protected == (self._launch, self._generation, copies)
        self._protected = (self._launch, self._generation, copies)
        for process in self._places.values():
            self._emit(process, EventName.WINDOW_PERSISTED, self._step, **edge, copies=copies)
            if not is_known:
                self._emit(process, EventName.PROTECTION, self._step, **level, **rest)
        if self._step % 48 == 0:
            fields = popularity_fields(self._step, self._random)
            self._emit(self._places[0], EventName.POPULARITY, self._step, **fields)

    def _evaluate_and_save(self) -> None:
        self._now += 2.0
        loss = 2.2 + 8.0 / (1 + self._step / 60)
        for process in self._places.values():
            fields = {"split": "validation", "loss": loss, "is_final": False, "duration_s": 2.0}
            self._emit(process, EventName.EVALUATION, self._step, **fields)
        self._now += 3.0
        for process in self._places.values():
            self._emit(process, EventName.CHECKPOINT_SAVED, self._step, duration_s=3.0)
            self._phase(process, Phase.TRAINING)

    def _strike(self, *, is_last: bool) -> None:
        """Kills a process, or all of a host; the job recovers in place, or is launched again."""
        stepped = self._now
        count = _OF_HOST if self._random.random() < 0.1 else 1
        first = self._random.randrange(len(self._places) // count) * count
        lost = list(range(first, first + count))
        fault = stepped + self._random.uniform(0.1, 1.1)
        code = self._random.choice((-9, -9, -11, 1))
        dead = [self._places[rank] for rank in lost]
        for process in dead:
            self._end(process, code, at_s=fault)
        out_of_spares = count > len(self._spares) or (is_last and not self.shape.ends_well)
        if out_of_spares:
            self._now = fault + 4.0
            for process in (*self._places.values(), *self._spares):
                if process not in dead:
                    self._end(process, 75)
            if is_last and not self.shape.ends_well:
                return
            self._now += 25.0
            self._start(again=True)
            return
        losses = [self._loss(rank) for rank in lost]
        for rank in lost:
            self._places[rank] = self._spares.pop(0)
        per = self.shape.layout.ranks_per_stage
        scope = sorted({rank // per for rank in lost})
        self._generation += 1
        times = self._times(fault, len(scope))
        self._recover(dataclasses.replace(times, stepped=stepped), losses, scope, "LOCALIZED")

    def _loss(self, rank: int) -> Mapping[str, Any]:
        process = self._places[rank]
        host, reason = self._host(process), "its connection to the control store is closed"
        return {"process": process, "rank": rank, "host": host, "reason": reason, "end": None}

    def _times(self, fault: float, stages: int) -> Times:
        found = [fault]
        for least, most in (
            *((1.0, 2.5), (0.2, 0.6), (0.4, 1.2), (0.3, 2.0), (0.05, 0.2), (0.3, 1.0)),
            *((4.0 + stages, 7.0 + stages), (0.1, 0.5), (0.02, 0.05)),
        ):
            found.append(found[-1] + self._random.uniform(least, most))
        return Times(fault, *found)

    def _publish(self, at_s: float, new: Collection[int]) -> None:
        """Has all ranks publish what a start or a recovery is planned from."""
        self.facts[round(at_s * 1e9)] = facts_of(
            self.shape.layout,
            places=self._places,
            new=new,
            step=self._step,
            window=self._window,
            host_of=self._host,
        )

    def _recover(
        self, times: Times, losses: Sequence[Any], scope: Sequence[int] | range, verdict: str
    ) -> None:
        """Has all ranks detect, plan and recover, at the times that were drawn."""
        steps = self._random.randrange(WINDOW, 2 * WINDOW)
        new = {rank for rank, one in self._places.items() if self._is_new(one)}
        per = self.shape.layout.ranks_per_stage
        self._publish(times.planned, new if losses else ())
        for rank, process in self._places.items():
            if losses:
                self._join(process, times, losses, is_new=rank in new)
            self._phase(process, Phase.PLANNING, times.built)
            self._emit(
                process,
                EventName.PLAN,
                self._step,
                at_s=times.planned,
                **self._plan(scope, steps, verdict),
            )
            replays = rank // per in scope
            self._phase(process, Phase.RESTORING, times.planned)
            self._phase(process, Phase.REPLAYING if replays else Phase.STANDING_BY, times.fetched)
            self._phase(process, Phase.REJOINING, times.replayed)
            for fields in self._outcome(times, replays, steps, scope, verdict):
                self._emit(process, EventName.RECOVERED, self._step, at_s=times.ended, **fields)
            self._phase(process, Phase.TRAINING, times.ended + 0.001)
        self._now = times.ended + 0.01

    def _is_new(self, process: int) -> bool:
        records = self.records[self._launch, process]
        return not any(one.event is EventName.PROCESS_START for one in records)

    def _join(self, process: int, times: Times, losses: Sequence[Any], *, is_new: bool) -> None:
        if is_new:
            introduction = {**self._introduction(), "entered_s": times.entered}
            introduction["joined_s"] = times.joined
            self._emit(process, EventName.PROCESS_START, at_s=times.built, **introduction)
            return
        self._emit(
            process,
            EventName.FAULT_DETECTED,
            self._step,
            at_s=times.joined,
            noticed_s=times.noticed,
            phase=Phase.TRAINING.value,
            losses=losses,
            last_step_s=times.stepped,
            teardown_s=times.entered - times.noticed,
            rendezvous_s=times.joined - times.entered,
        )

    def _plan(self, scope: Sequence[int] | range, steps: int, verdict: str) -> Mapping[str, Any]:
        stages = ", ".join(str(stage) for stage in scope)
        return {
            "verdict": verdict,
            "reason": f"stages {stages} replay from the newest persisted window",
            "target": self._step,
            "scope": list(scope),
            "window": max(0, self._step - steps),
            "replayed_steps": steps,
            "lost_steps": 0,
            "roll_forward": [],
            "copies": [],
            "digest": "0" * 16,
        }

    def _outcome(
        self, times: Times, replays: bool, steps: int, scope: Sequence[int] | range, verdict: str
    ) -> Iterator[Mapping[str, Any]]:
        """Yields what a rank records at the end of a recovery."""
        replay_s, again_s = times.replayed - times.fetched, times.reprotected - times.replayed
        parts = {
            "detect": times.noticed - times.stepped,
            "teardown": times.entered - times.noticed,
            "rendezvous": times.joined - times.entered,
            "build": times.built - times.joined,
            "plan": times.planned - times.built,
            "fetch": times.fetched - times.planned,
            "replay": replay_s if replays else 0.0,
            "reprotect": again_s if replays else 0.0,
            "wait": times.ended - times.reprotected + (0.0 if replays else replay_s + again_s),
        }
        equal = {"equal": steps, "unequal": 0}
        proof = {
            **dict.fromkeys(("scalars", "tensors", "slots", "states"), equal),
            "targets": 1,
            "ranks": 1,
        }
        yield {
            "verdict": verdict,
            "scope": list(scope),
            "guarantee": "EXACT",
            "replayed_steps": steps if replays else 0,
            "replay_verified": True if replays else None,
            "replay_proof": proof if replays else None,
            "duration_s": sum(parts.values()),
            "breakdown_s": parts,
            "rejoined_s": times.ended,
            "hashed_bytes": 1 << 20,
            "owed_copies": 1 if replays else 0,
            "moved_copies": 0,
        }

    def _end(self, process: int, code: int, at_s: float | None = None) -> None:
        """Records the end of a process, as its launcher does."""
        record = EventRecord(
            at_s or self._now,
            -1,
            99,
            0,
            0,
            EventName.PROCESS_END,
            {
                "launch": f"launch-{self._launch}",
                "process": process,
                "host": self._host(process),
                "child": 4000 + 100 * self._launch + process,
                "started_s": self._launched_s,
                "code": code,
            },
        )
        self.records[self._launch, -1].append(record)


def _line(record: EventRecord) -> Mapping[str, Any]:
    """Returns an event as its line of a file holds it."""
    return {
        "time": record.time,
        "logical_rank": record.logical_rank,
        "pid": record.pid,
        "generation": record.generation,
        "iteration": record.iteration,
        "event": record.event.value,
        **record.fields,
    }
