# SPDX-License-Identifier: Apache-2.0
"""Runs of the training program that are stopped on the way, and resumed, by a test.

A run is one folder: the checkpoints, the digest of each of its jobs, the events of all of them.
Its jobs have the same flags, so where one starts depends on the checkpoint that it finds alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import time
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from random import Random
from typing import Any

from tests.harness.fork_server import ForkServer, Job, JobFailedError, JobResult

_MOMENTS = 5
"""How often a moment is drawn when jobs end before theirs has come."""
_LONGEST_WAIT_S = 0.2
"""After a step was reported: longer than a small step with a save takes."""
_TIMEOUT_S = 100.0


class Stop(Enum):
    """How a job is stopped on the way."""

    NEVER = "never"
    EXIT_INTERVAL = "exit-interval"
    SIGTERM = "sigterm"
    SIGKILL = "sigkill"


@dataclasses.dataclass(frozen=True)
class Program:
    """The training program with its flags, on a number of ranks."""

    server: ForkServer
    path: Path
    world_size: int
    train_iters: int
    flags: tuple[str, ...]
    timeout_s: float = _TIMEOUT_S
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Run:
    """One run of a program, of one job or of several that follow each other.

    Args:
        program: what runs.
        folder: an empty folder for all that the run writes.
    """

    def __init__(self, program: Program, folder: Path) -> None:
        self._program = program
        self._folder = folder
        self._jobs = 0

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self._folder / "checkpoints"

    @property
    def events(self) -> Path:
        """The folder of the events of all jobs."""
        return self._folder / "events"

    @property
    def store(self) -> Path:
        """The folder of the snapshots, if the program takes any."""
        return self._folder / "store"

    def finish(self, *flags: str) -> dict[str, Any]:
        """Runs a job to its own end and returns its digest.

        Raises:
            JobFailedError: a rank failed.
        """
        with self.start(*flags) as job:
            job.wait().check()
        return self._digest()

    def stop_on_the_way(self, stop: Stop, random: Random) -> int | None:
        """Starts the run and stops it before its end.

        Returns:
            The step at which it was stopped; None when it was killed, since then nobody knows.

        Raises:
            JobFailedError: a rank failed, or did not end as the stop demands.
        """
        for _ in range(_MOMENTS):
            attempt = Run(self._program, self._folder / f"attempt{self._jobs}")
            step = attempt._stop_once(stop, random)
            if step != self._program.train_iters:
                self._folder, self._jobs = attempt._folder, attempt._jobs
                return step
            # It had reached its end before the signal came, which proves nothing.
            self._jobs += 1
        raise JobFailedError(f"{_MOMENTS} jobs ended before a signal came")

    def _stop_once(self, stop: Stop, random: Random) -> int | None:
        last = self._program.train_iters - 2
        match stop:
            case Stop.EXIT_INTERVAL:
                # The multiples of more than half the steps: one lies on the way.
                half = self._program.train_iters // 2
                interval = random.randint(half + 1, self._program.train_iters - 1)
                return int(self.finish(f"--exit-interval={interval}")["iteration"])
            case Stop.SIGTERM:
                ranks = range(self._program.world_size)
                told = random.sample(ranks, random.randint(1, len(ranks)))
                with self.start() as job:
                    self._await_moment(job, random.randint(1, last), random)
                    send(job, signal.SIGTERM, told)
                    job.wait().check()
                return int(self._digest()["iteration"])
            case Stop.SIGKILL:
                result = self.kill(random.randint(0, last), random)
                ended = all(code == 0 for code in result.exit_codes)
                return self._program.train_iters if ended else None
            case Stop.NEVER:
                raise ValueError("a run that is never stopped has no way to be stopped on")

    def kill(self, step: int, random: Random) -> JobResult:
        """Starts a job and kills all ranks some time after a step; 0 is the start of the job."""
        with self.start() as job:
            self._await_moment(job, step, random)
            return kill_all(job, self._program.world_size)

    def _await_moment(self, job: Job, step: int, random: Random) -> None:
        """Waits until a step was reported, and some time more."""
        if step:
            with contextlib.suppress(JobFailedError):  # it has ended, as its exit codes will say
                job.wait_for_output(self._program.world_size - 1, f"iteration {step:8d}/")
        time.sleep(random.uniform(0, _LONGEST_WAIT_S))

    def start(self, *flags: str) -> Job:
        """Starts the next job of the run."""
        self._jobs += 1
        return self._program.server.start_program(
            self._program.path,
            [
                *self._program.flags,
                f"--train-iters={self._program.train_iters}",
                f"--save={self.checkpoints}",
                f"--load={self.checkpoints}",
                f"--data-cache-path={self._folder / 'index'}",
                f"--moevement-event-dir={self.events}",
                f"--moevement-store-dir={self.store}",
                f"--moevement-state-digest={self._digest_path()}",
                "--log-interval=1",
                *flags,
            ],
            world_size=self._program.world_size,
            timeout_s=self._program.timeout_s,
            env=self._program.env,
        )

    def _digest_path(self) -> Path:
        return self._folder / f"digest{self._jobs}.json"

    def _digest(self) -> dict[str, Any]:
        digest: dict[str, Any] = json.loads(self._digest_path().read_text())
        return digest


def kill_all(job: Job, world_size: int) -> JobResult:
    """Kills all ranks at one moment and returns how they ended.

    Raises:
        JobFailedError: a rank had failed before.
    """
    # Stopped first: no rank lives to see another one dead.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        send(job, number, range(world_size))
    result = job.wait()
    if not set(result.exit_codes) <= {0, -signal.SIGKILL}:
        raise JobFailedError(result.describe())
    return result


def send(job: Job, number: signal.Signals, ranks: Iterable[int]) -> None:
    """Sends a signal to ranks; a job that has ended gets nothing."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for rank in ranks:
            job.kill(rank, number)


def digest_differences(one: dict[str, Any], other: dict[str, Any], path: str = "") -> list[str]:
    """Returns where two digests differ, as paths of their keys."""
    found = []
    for key in sorted(one.keys() | other.keys()):
        left, right = one.get(key), other.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            found += digest_differences(left, right, f"{path}/{key}")
        elif left != right:
            found.append(f"{path}/{key}")
    return found
