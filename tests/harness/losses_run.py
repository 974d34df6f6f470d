# SPDX-License-Identifier: Apache-2.0
"""Runs of the cells of `losses`: processes killed at one moment, and what the job must show."""

from __future__ import annotations

import contextlib
import shutil
import signal
from pathlib import Path
from typing import Any

from megatron_moevement.runtime.observation.events import EventName, EventRecord
from tests.harness.fork_server import ForkServer, Job, JobResult
from tests.harness.interruption import Program, Run, digest_differences, send
from tests.harness.losses import Losses, Memory
from tests.harness.protected_run import ALWAYS_TRAINED, PROGRAM
from tests.harness.random_text import data_flags
from tests.harness.restarted_run import (
    RESTARTABLE,
    await_step,
    check_survivors,
    events_of,
)

_TIMEOUT_S = 250.0


def plain_program(cell: Losses, server: ForkServer, data: Path) -> Program:
    """Returns the training program of a cell; nothing protects or strikes it.

    Args:
        cell: what is trained.
        server: forks its ranks.
        data: prefix of prepared text.
    """
    flags = (*cell.all_flags, *ALWAYS_TRAINED, *data_flags(data))
    return Program(server, PROGRAM, cell.ranks, cell.train_iters, flags, _TIMEOUT_S)


def protected_program(cell: Losses, server: ForkServer, data: Path, path: Path) -> Program:
    """Returns the program of a cell with its protection and its spares.

    Args:
        cell: what is trained.
        server: forks its processes.
        data: prefix of prepared text.
        path: the program, which takes `--domain-size`.
    """
    # Who takes the place of a dead process goes on with what that one left on the machine.
    restartable = [flag for flag in RESTARTABLE if flag != "--moevement-no-adoption"]
    flags = (
        *(*plain_program(cell, server, data).flags, *restartable),
        "--moevement-strategy=moevement",
        f"--moevement-window={cell.window}",
        f"--moevement-replicas={cell.replicas}",
        "--moevement-no-replica-copy",
        f"--inprocess-active-world-size={cell.ranks}",
        f"--inprocess-granularity={'node' if cell.domain_size > 1 else 'rank'}",
        f"--domain-size={cell.domain_size}",
    )
    return Program(server, path, cell.ranks + cell.spares, cell.train_iters, flags, _TIMEOUT_S)


class LossesRun:
    """One job of a cell."""

    def __init__(self, cell: Losses, program: Program, folder: Path) -> None:
        """Starts nothing yet.

        Args:
            cell: what is trained, and who is lost.
            program: of the cell.
            folder: an empty one, for all that the run writes.
        """
        self._cell = cell
        self._run = Run(program, folder)
        self._result: JobResult | None = None
        self._pids: tuple[int, ...] = ()

    def go(self) -> JobResult:
        """Runs the job, and kills the processes at one moment behind a persisted window."""
        with self._run.start() as job:
            self._pids = job.pids
            await_step(self._run, job, self._cell.protected_from)
            # Stopped first: none of them lives to see another one dead.
            for number in (signal.SIGSTOP, signal.SIGKILL):
                send(job, number, self._cell.lost)
            if self._cell.memory is Memory.LOST:
                self._forget(job)
            self._result = job.wait()
        return self._result

    def digest(self) -> dict[str, Any]:
        """Returns what the job ended with."""
        return self._run._digest()  # noqa: SLF001

    def _forget(self, job: Job) -> None:
        for process in self._cell.lost:
            job.wait_for_rank(process)
            for folder in self._run.store.glob(f"*/process-{process}"):
                shutil.rmtree(folder, ignore_errors=True)
                with contextlib.suppress(OSError):  # there are others
                    folder.parent.rmdir()

    def check(self, uninterrupted: dict[str, Any]) -> None:
        """Checks ends, bits, verdict, scope, replayed steps, bystanders, and that nothing is left.

        Args:
            uninterrupted: the digest of the same training without protection and losses.

        Raises:
            AssertionError: something is not as it has to be.
        """
        cell, result = self._cell, self._result
        assert result is not None
        for process, code in enumerate(result.exit_codes):
            if process in cell.lost:
                assert code == -signal.SIGKILL, result.describe()
            else:  # who is given up with its domain keeps what it has, and ends
                assert (code == 0) != (process in cell.given_up), result.describe()
        found = digest_differences(self.digest(), uninterrupted)
        assert not found, f"{len(found)} digests or losses differ, the first: {found[:3]}"
        self._check_recovery()
        survivors = sorted(set(range(cell.ranks)) - cell.given_up)
        if survivors:
            check_survivors(self._run, [self._pids[one] for one in survivors], generations=1)
        if not cell.given_up - set(cell.lost):
            left = list(self._run.store.rglob("*"))
            assert not left, left

    def _check_recovery(self) -> None:
        """Checks that the lost stages alone replayed, once, and proved it."""
        cell = self._cell
        plans = self._of_all_ranks(EventName.PLAN)
        (fields,) = [plan.fields for plan in plans if plan.logical_rank == 0]
        assert (fields["verdict"], tuple(fields["scope"])) == (cell.verdict, cell.scope), fields
        trained = events_of(self._run, EventName.ITERATION, 0)
        forgotten = cell.lost if cell.memory is Memory.LOST else ()
        known = [one.iteration for one in trained if one.logical_rank not in forgotten]
        assert fields["target"] >= max(known, default=0)
        steps = fields["target"] - fields["window"]
        assert cell.window - 1 <= steps <= 3 * cell.window
        for event in self._of_all_ranks(EventName.RECOVERED):
            replays = event.logical_rank // cell.ranks_per_stage in cell.scope
            assert event.fields["replayed_steps"] == (steps if replays else 0)
            assert event.fields["replay_verified"] is (True if replays else None)
            assert replays or event.fields["forward_passes"] == 0
            assert replays or event.fields["backward_passes"] == 0

    def _of_all_ranks(self, name: EventName) -> list[EventRecord]:
        events = events_of(self._run, name, 1)
        ranks = sorted(event.logical_rank for event in events)
        assert ranks == list(range(self._cell.ranks)), (name, ranks)
        return events
