# SPDX-License-Identifier: Apache-2.0
"""Runs of the rows of the fault cover: real jobs that are struck twice, and what they must show."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any

from megatron_moevement.errors import ExitCode
from megatron_moevement.policy.faults.fault_schedule import FaultKind
from megatron_moevement.runtime.observation.events import EventName, EventRecord
from tests.harness.fault_cover import LARGE, TRAIN_ITERS, Row
from tests.harness.fault_cover_changes import check_change, replayed_window
from tests.harness.fork_server import ForkServer, Job, JobFailedError, JobResult
from tests.harness.interruption import Program, Run, digest_differences
from tests.harness.protected_run import ALWAYS_TRAINED, PROGRAM
from tests.harness.punctual_changes import VARIABLE
from tests.harness.random_text import data_flags
from tests.harness.restarted_run import (
    RESTARTABLE,
    await_step,
    check_survivors,
    events_of,
    kill_rank,
)

EXIT_CODES: dict[FaultKind, set[int]] = {
    FaultKind.KILL: {-signal.SIGKILL},
    FaultKind.STOP: {-signal.SIGKILL},
    FaultKind.EXCEPTION: {ExitCode.DONE},
    FaultKind.EXIT: {ExitCode.FAILURE},
    FaultKind.SEGFAULT: {-signal.SIGSEGV},
}
"""How a process ends that is struck. After an exception it lives. A stopped one is killed where it
stands by its monitor, which does not wake it first."""
_HANG_TIMEOUTS = ("--inprocess-soft-timeout=3", "--inprocess-hard-timeout=4")
_LARGE_TIMEOUTS = (
    "--inprocess-monitor-process-interval=0.25",
    "--inprocess-soft-timeout=15",
    "--inprocess-hard-timeout=18",
)
_TIMEOUT_S = 100.0
_LARGE_TIMEOUT_S = 280.0
_POLL_S = 0.02
CHANGING = Path(__file__).parents[1] / "strategies" / "changing_pretrain.py"
"""Trains what the training program does, under schedules that change at known steps."""


def plain_program(row: Row, server: ForkServer, data: Path) -> Program:
    """Returns the training program of a row; nothing protects or strikes it.

    Args:
        row: what is trained.
        server: forks its ranks.
        data: prefix of prepared text.
    """
    flags = (*row.flags, *ALWAYS_TRAINED, *data_flags(data))
    limit_s = _LARGE_TIMEOUT_S if row.layout == LARGE else _TIMEOUT_S
    return Program(server, PROGRAM, row.arranged.ranks, TRAIN_ITERS, flags, limit_s)


def struck_program(row: Row, server: ForkServer, data: Path) -> Program:
    """Returns the program of a row with its protection, its fault and its spares."""
    plain = plain_program(row, server, data)
    times: tuple[str, ...] = _LARGE_TIMEOUTS if row.layout == LARGE else ()
    if row.kind == FaultKind.STOP.value and not times:
        times = _HANG_TIMEOUTS
    flags = (
        *(*plain.flags, *row.protection, *RESTARTABLE, *times),
        f"--inprocess-active-world-size={plain.world_size}",
    )
    struck = dataclasses.replace(plain, world_size=plain.world_size + row.spares, flags=flags)
    if row.planned is None:
        return struck
    return dataclasses.replace(struck, path=CHANGING, env={VARIABLE: str(row.planned.due)})


class StruckRun:
    """One job of a row, from its start to what is known of it afterwards."""

    def __init__(self, row: Row, program: Program, folder: Path, random: Random) -> None:
        """Starts nothing yet.

        Args:
            row: what is trained, and what happens to it.
            program: of the row.
            folder: an empty one, for all that the run writes.
            random: draws whom the kill from outside strikes, and when.
        """
        self._row = row
        self._run = Run(program, folder)
        self._random = random
        self._outside_rank = row.other_rank(random)
        self._outside_pid = 0
        self._pids: tuple[int, ...] = ()
        self._result: JobResult | None = None

    def go(self) -> None:
        """Runs the job and kills a process from outside, before or after the fault.

        Raises:
            JobFailedError: the job ended before.
        """
        row, run = self._row, self._run
        with run.start() as job:
            self._pids = job.pids
            if row.is_outside_first:
                await_step(run, job, row.protected_from)
            else:
                self._await(job, lambda: bool(events_of(run, EventName.FAULT_INJECTED, None)))
                if row.restarts:
                    self._await(job, lambda: bool(events_of(run, EventName.ITERATION, 1)))
                else:
                    await_step(run, job, row.step + 2)
            forget = row.turn % 2 == 0
            process = kill_rank(run, job, self._outside_rank, self._random, forget=forget)
            self._outside_pid = job.pids[process]
            self._result = job.wait()

    def _await(self, job: Job, holds: Callable[[], bool]) -> None:
        while not holds():
            job.poll()
            if job.has_ended:
                raise JobFailedError(job.wait().describe())
            time.sleep(_POLL_S)

    def check(self, uninterrupted: dict[str, Any]) -> None:
        """Checks ends, bits, verdicts, replays, bystanders, survivors and the change.

        Args:
            uninterrupted: the digest of the same training without protection and faults.

        Raises:
            AssertionError: something is not as it has to be.
        """
        struck = self._check_fault()
        self._check_ends(struck)
        found = digest_differences(self._run._digest(), uninterrupted)  # noqa: SLF001
        assert not found, f"{len(found)} digests or losses differ, the first: {found[:3]}"
        row = self._row
        faults = [(row.lost_stage, row.verdicts)] if row.restarts else []
        outside = (self._outside_rank // row.arranged.ranks_per_stage, frozenset({row.replayed}))
        faults.insert(0 if row.is_outside_first else len(faults), outside)
        for generation, (stage, verdicts) in enumerate(faults, start=1):
            self._check_recovery(generation, stage, verdicts)
        lost = {self._outside_pid} | ({struck.pid} if row.is_deadly else set())
        starts = events_of(self._run, EventName.PROCESS_START, 0)
        survivors = {event.pid for event in starts} - lost
        assert len(survivors) >= row.arranged.ranks - len(lost)
        check_survivors(self._run, sorted(survivors), generations=len(faults))
        assert list(self._run.store.rglob("*")) == []
        check_change(row, self._run)

    def _check_fault(self) -> EventRecord:
        """Checks that the fault struck once, where it should; returns its event."""
        fault, events = self._row.fault, events_of(self._run, EventName.FAULT_INJECTED, None)
        assert self._result is not None
        assert len(events) == 1, self._result.describe()
        event = events[0]
        where = (event.logical_rank, event.iteration, event.fields["place"], event.generation)
        assert where == (self._row.rank, fault.step, fault.place.value, fault.generation)
        assert event.fields["kind"] == fault.kind.value
        return event

    def _check_ends(self, struck: EventRecord) -> None:
        """Checks how each process ended; those that were not struck end well."""
        assert self._result is not None
        expected: dict[int, set[int]] = {pid: {ExitCode.DONE} for pid in self._pids}
        expected[struck.pid] = EXIT_CODES[FaultKind(self._row.kind)]
        # Whom an exception left alive may be killed from outside.
        expected[self._outside_pid] = {-signal.SIGKILL}
        found = dict(zip(self._pids, self._result.exit_codes, strict=True))
        assert all(found[pid] in expected[pid] for pid in found), self._result.describe()

    def _check_recovery(self, generation: int, stage: int, verdicts: Iterable[str]) -> None:
        """Checks that who has to replay, and nobody else, has replayed and proved it."""
        plans = self._of_all_ranks(EventName.PLAN, generation)
        (fields,) = [plan.fields for plan in plans if plan.logical_rank == 0]
        assert all(plan.fields == fields for plan in plans)
        assert fields["verdict"] in verdicts, (generation, fields["reason"])
        is_replayed = fields["verdict"] == self._row.replayed
        stages = range(self._row.arranged.stages) if self._row.is_global else (stage,)
        assert fields["scope"] == (list(stages) if is_replayed else []), fields["reason"]
        steps = fields["target"] - fields["window"] if is_replayed else 0
        if is_replayed:
            window = replayed_window(self._run, generation, fields["window"])
            assert steps >= window.size - 1
        for event in self._of_all_ranks(EventName.RECOVERED, generation):
            replays = self._stage_of(event) in fields["scope"]
            assert event.fields["verdict"] == fields["verdict"]
            assert event.fields["replayed_steps"] == (steps if replays else 0)
            assert event.fields["replay_verified"] is (True if replays else None)
            forward, backward = event.fields["forward_passes"], event.fields["backward_passes"]
            assert forward == (steps * self._row.arranged.passes if replays else 0)
            assert replays or backward == 0
        self._check_replays(generation, fields["scope"], fields["window"], steps)

    def _check_replays(
        self, generation: int, scope: Iterable[int], window: int | None, steps: int
    ) -> None:
        replayed: dict[int, list[int]] = {}
        for event in events_of(self._run, EventName.REPLAY, generation):
            assert event.fields["replay_verified"] is True
            assert self._row.is_global or event.fields["boundaries_equal"] > 0
            assert event.fields["boundaries_unequal"] == event.fields["boundaries_unknown"] == 0
            replayed.setdefault(event.logical_rank, []).append(event.iteration)
        expected = list(range((window or 0) + 1, (window or 0) + steps + 1))
        ranks = range(self._row.arranged.ranks)
        size = self._row.arranged.ranks_per_stage
        assert replayed == {rank: expected for rank in ranks if rank // size in scope}

    def _of_all_ranks(self, name: EventName, generation: int) -> list[EventRecord]:
        """Returns the events of a name, of which each rank has written one."""
        events = events_of(self._run, name, generation)
        ranks = sorted(event.logical_rank for event in events)
        assert ranks == list(range(self._row.arranged.ranks)), (name, generation, ranks)
        return events

    def _stage_of(self, event: EventRecord) -> int:
        return event.logical_rank // self._row.arranged.ranks_per_stage
