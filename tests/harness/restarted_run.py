# SPDX-License-Identifier: Apache-2.0
"""Runs that are restarted within their processes: who is killed, and what survivors must show."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

from megatron_moevement.runtime.observation.events import EventName, EventRecord, read_events
from megatron_moevement.settings.launch import Address
from tests.harness.fork_server import ForkServer, Job, JobFailedError, JobResult
from tests.harness.interruption import Program, Run, kill_all
from tests.harness.protected_run import Case

RESTARTABLE = (
    "--inprocess-restart",
    "--inprocess-monitor-thread-interval=0.05",
    "--inprocess-monitor-process-interval=0.05",
    "--inprocess-progress-watchdog-interval=0.2",
    "--inprocess-heartbeat-interval=0.5",
    "--inprocess-heartbeat-timeout=10",
    "--inprocess-soft-timeout=20",
    "--inprocess-hard-timeout=25",
    "--inprocess-barrier-timeout=40",
    "--inprocess-completion-timeout=40",
    "--inprocess-last-call-wait=0",
    "--inprocess-termination-grace-time=0.1",
    "--moevement-no-adoption",
)
"""Quick to notice a dead process, and patient with a slow machine; its memory goes with it."""
_POLL_S = 0.02


def restartable_program(
    case: Case, server: ForkServer, data: Path, spares: int, *flags: str
) -> Program:
    """Returns the protected training program of a case, with spares that wait.

    Args:
        case: what is trained.
        server: forks its processes.
        data: prefix of prepared text.
        spares: processes more than ranks.
        flags: more of them; they win.
    """
    ranks = case.combination.world_size
    program = case.protected_program(
        server, data, *RESTARTABLE, f"--inprocess-active-world-size={ranks}", *flags
    )
    return dataclasses.replace(program, world_size=ranks + spares)


def await_step(run: Run, job: Job, step: int) -> None:
    """Waits until a step was reported in the newest generation.

    Raises:
        JobFailedError: the job ended before.
    """
    while not any(
        event.iteration >= step for event in events_of(run, EventName.ITERATION, generation=None)
    ):
        _check_runs(job)
        time.sleep(_POLL_S)


def generation_of(run: Run) -> int:
    """Returns the newest generation of which anything was recorded."""
    return max((event.generation for event in _events(run)), default=0)


def kill_rank(run: Run, job: Job, rank: int, random: Random, *, forget: bool = True) -> int:
    """Kills the process that occupies a rank within the next two steps; returns its number.

    Args:
        run: of the job.
        job: runs.
        rank: whose process.
        random: draws the time.
        forget: whether what it kept in memory is lost with it, as with its machine.
    """
    steps = events_of(run, EventName.ITERATION, generation=None)
    time.sleep(moment_of_kill([step.fields["duration_s"] for step in steps], random))
    process = kill_occupant(run, job, rank)
    if forget:
        job.wait_for_rank(process)
        for folder in run.store.glob(f"*/process-{process}"):
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # others are there, unless they have ended meanwhile
                folder.parent.rmdir()
    return process


def kill_occupant(run: Run, job: Job, rank: int) -> int:
    """Kills the process that occupies a rank at once; returns its number."""
    occupants = [event for event in _events(run) if event.logical_rank == rank]
    process = job.pids.index(occupants[-1].pid)
    job.kill(process, signal.SIGKILL)
    return process


def kill_together(run: Run, place: str, *flags: str) -> JobResult:
    """Starts a job and kills ranks 0 and 1 at one moment, when rank 1 has come to a place.

    Args:
        run: of the job.
        place: in the form STEP:PLACE of `--moevement-faults`; rank 1 stops there until it dies.
        flags: more of them.
    """
    before = len(events_of(run, EventName.FAULT_INJECTED, generation=None))
    with run.start("--moevement-faults", f"stop:{place}@1", *flags) as job:
        while len(events_of(run, EventName.FAULT_INJECTED, generation=None)) == before:
            _check_runs(job)
            time.sleep(_POLL_S)
        return kill_all(job, 2)


def moment_of_kill(durations_s: Sequence[float], random: Random) -> float:
    """Draws when to strike: any moment of the next two steps, however long steps are.

    Args:
        durations_s: of the steps that were observed, one at least.
        random: draws.

    Returns:
        Seconds from now.
    """
    return random.uniform(0, 2 * statistics.median(durations_s))


def control_of(job: Job) -> Address:
    """Returns the address of a job's control store."""
    return job.store_address[0], job.control_port


def check_survivors(run: Run, survivors: Sequence[int], generations: int) -> None:
    """Checks that processes went through all generations with the objects of the first.

    Args:
        run: is over.
        survivors: their process ids.
        generations: restarts that the job had.

    Raises:
        AssertionError: one was started anew, or built its model anew.
    """
    faults = events_of(run, EventName.FAULT_DETECTED, generation=None)
    assert max(event.generation for event in faults) == generations
    for pid in survivors:
        lived = [event for event in faults if event.pid == pid]
        assert [event.generation for event in lived][-1] == generations
        assert {event.fields["builds"] for event in lived} == {1}
        starts = events_of(run, EventName.PROCESS_START, generation=None)
        assert len([event for event in starts if event.pid == pid]) == 1


def check_verdicts(run: Run, case: Case, restarts: int) -> None:
    """Checks that every restart went on from memory, by replays that proved to be right.

    Args:
        run: is over.
        case: what it trained.
        restarts: that the job had.

    Raises:
        AssertionError: it did not.
    """
    for generation in range(1, restarts + 1):
        plans = events_of(run, EventName.PLAN, generation)
        assert {plan.fields["verdict"] for plan in plans} == {"GLOBAL"}, generation
        assert len({plan.fields["window"] for plan in plans}) == 1
        replays = events_of(run, EventName.REPLAY, generation)
        assert all(replay.fields["replay_verified"] for replay in replays)
    last = events_of(run, EventName.REPLAY, restarts)
    ranks = {event.logical_rank for event in last}
    assert len(ranks) == case.combination.world_size
    steps = {event.iteration for event in last}
    assert len(steps) >= case.window - 1


def events_of(run: Run, name: EventName, generation: int | None) -> list[EventRecord]:
    """Returns the events of a name, of a generation or of all."""
    return [
        event
        for event in _events(run)
        if event.event is name and generation in {None, event.generation}
    ]


def _events(run: Run) -> list[EventRecord]:
    return read_events(run.events) if run.events.exists() else []


def _check_runs(job: Job) -> None:
    job.poll()
    if job.has_ended:
        raise JobFailedError(job.wait().describe())
