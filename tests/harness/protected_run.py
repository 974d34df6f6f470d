# SPDX-License-Identifier: Apache-2.0
"""Runs that sparse snapshots protect: what is trained, and what a recovery must have done."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from random import Random
from typing import Any

from megatron_moevement.runtime.observation.events import EventName, EventRecord, read_events
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.testing.lost_states import LostStates
from tests.harness.combinations import Combination
from tests.harness.fork_server import ForkServer, JobFailedError
from tests.harness.interruption import Program, Run, kill_all
from tests.harness.random_text import data_flags

PROGRAM = Path(__file__).parents[2] / "pretrain_moe.py"
ALWAYS_TRAINED = ("--num-workers=1", "--moevement-no-progress-bar")
"""Flags of every run, protected or not."""
_STEPS_PER_DEATH = 9
"""Up to five are meant to pass; a busy machine kills later."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained, how it is protected, and how often it dies.

    Attributes:
        combination: layout, precision, optimizer, experts and the rest.
        window: W.
        replicas: r.
        deaths: launches that do not reach the end.
        lost: what becomes of the states of lost ranks.
    """

    combination: Combination
    window: int
    replicas: int = 2
    deaths: int = 2
    lost: LostStates = LostStates.REPLAYED

    @classmethod
    def of(cls, text: str, window: int) -> Case:
        """Reads the levels of a combination by name; the others are those that come first."""
        return cls(Combination.of(text), window)

    @property
    def protected_from(self) -> int:
        """A step whose commit means that a window is persisted: the ring has no more room."""
        return 2 * self.window + 1

    @property
    def train_iters(self) -> int:
        """Steps of a run: enough to die after a window was persisted."""
        return self.protected_from + self.deaths * _STEPS_PER_DEATH

    @property
    def name(self) -> str:
        """A name for a test."""
        return f"w{self.window}-r{self.replicas}-{self.combination.name}"

    def program(self, server: ForkServer, data: Path, *flags: str) -> Program:
        """Returns the training program of the case; nothing protects it.

        Args:
            server: forks its ranks.
            data: prefix of prepared text.
            flags: more of them; they win.
        """
        return Program(
            server,
            PROGRAM,
            self.combination.world_size,
            self.train_iters,
            (*self.combination.flags, *ALWAYS_TRAINED, *data_flags(data), *flags),
        )

    def protected_program(self, server: ForkServer, data: Path, *flags: str) -> Program:
        """Returns the training program of the case, protected by sparse snapshots."""
        protection = (
            "--moevement-strategy=moevement",
            f"--moevement-window={self.window}",
            f"--moevement-replicas={self.replicas}",
            *self.lost.flags,
        )
        return self.program(server, data, *protection, *flags)


def next_death(run: Run, case: Case) -> int:
    """Returns a step that a run has not committed yet, behind a persisted window."""
    reported = [
        event.iteration for event in read_events(run.events) if event.event is EventName.ITERATION
    ]
    return max([case.protected_from, *(step + 2 for step in reported)])


def kill_at_random(run: Run, case: Case, step: int, random: Random) -> None:
    """Starts a job and kills all ranks at some moment of the two steps after a step.

    Raises:
        JobFailedError: the job ended before.
    """
    last = case.combination.world_size - 1
    with run.start() as job:
        job.wait_for_output(last, f"iteration {step:8d}/")
        durations = [
            event.fields["duration_s"]
            for event in read_events(run.events)
            if event.event is EventName.ITERATION
        ]
        time.sleep(random.uniform(0, 2 * durations[-1]))
        result = kill_all(job, case.combination.world_size)
    if -signal.SIGKILL not in result.exit_codes:
        raise JobFailedError(f"it ended before it was killed: {result.describe()}")


def die(
    run: Run,
    case: Case,
    place: FaultPoint,
    steps: Iterable[int],
    ranks: Iterable[int] | None = None,
) -> None:
    """Runs a job that dies at the first of some steps that comes to a place.

    The ranks that are struck die by themselves, unless they see another one dead before.

    Args:
        run: of the case.
        case: what is trained.
        place: where.
        steps: when.
        ranks: who is struck; None: all.

    Raises:
        JobFailedError: nobody died, or somebody else.
    """
    struck = set(range(case.combination.world_size) if ranks is None else ranks)
    names = ",".join(str(rank) for rank in sorted(struck))
    faults = [f"{step}:{place.value}@{names}" for step in steps]
    with run.start("--moevement-faults", *faults) as job:
        result = job.wait()
    dead = {rank for rank, code in enumerate(result.exit_codes) if code == -signal.SIGKILL}
    if not dead or not dead <= struck or 0 in result.exit_codes or result.timed_out:
        raise JobFailedError(f"{place}: {result.describe()}")


def plans_of(run: Run) -> list[dict[str, Any]]:
    """Returns the plans of a run's recoveries, as rank 0 recorded them."""
    return [dict(event.fields) for event in _events_of(run, EventName.PLAN, 0)]


def check_replays(
    run: Run, case: Case, launches: int, cut: int = 0, forgotten: Collection[int] = ()
) -> None:
    """Checks that launches went on from memory, by replays of at least W - 1 steps.

    Every rank replayed every step from the window to the target, with frozen operators until the
    window was converted, and each step proved to be what the ledger says. No step was lost that
    had been reported before.

    Args:
        run: is over.
        case: what it trained.
        launches: that found something in memory, and nothing else.
        cut: how many of them, the last one excepted, may have died while they replayed.
        forgotten: ranks whose memory was lost, and with it the step that they alone had committed.

    Raises:
        AssertionError: it did not.
    """
    _check_no_step_is_lost(run, forgotten)
    plans = plans_of(run)
    assert [plan["verdict"] for plan in plans] == ["GLOBAL"] * launches
    for rank in range(case.combination.world_size):
        whole = 0
        lives = _lives_of(run, rank)[-launches:]
        for number, (plan, replays) in enumerate(zip(plans, lives, strict=True)):
            start, target = plan["window"], plan["target"]
            assert target - start >= case.window - 1
            steps = list(range(start + 1, target + 1))
            whole += len(replays) == len(steps)
            assert [replay.iteration for replay in replays] == steps[: len(replays)]
            assert number < launches - 1 or len(replays) == len(steps)
            for replay in replays:
                assert replay.fields["replay_verified"]
                assert (replay.fields["frozen"] > 0) == (replay.iteration < start + case.window)
        assert whole >= launches - cut


def _check_no_step_is_lost(run: Run, forgotten: Collection[int]) -> None:
    """Checks that every recovery leads to the newest step that launches before it reported."""
    newest = 0
    for event in read_events(run.events):
        if event.event is EventName.PLAN:
            assert event.fields["target"] >= newest
        elif event.event is EventName.ITERATION and event.logical_rank not in forgotten:
            newest = max(newest, event.iteration)
    assert newest


def _lives_of(run: Run, rank: int) -> list[list[EventRecord]]:
    """Returns the replayed steps of each process that has occupied a rank."""
    lives: dict[int, list[EventRecord]] = {}
    for event in read_events(run.events):
        if event.logical_rank == rank:
            replays = lives.setdefault(event.pid, [])
            if event.event is EventName.REPLAY:
                replays.append(event)
    return list(lives.values())


def _events_of(run: Run, name: EventName, rank: int) -> list[EventRecord]:
    return [
        event
        for event in read_events(run.events)
        if (event.event, event.logical_rank) == (name, rank)
    ]
