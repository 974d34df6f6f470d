# SPDX-License-Identifier: Apache-2.0
"""Jobs that lose stages, what is lost of them, and what their recovery must have done."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_moevement.runtime.observation.events import EventName, EventRecord, read_events
from megatron_moevement.testing.lost_states import LostStates
from tests.harness.combinations import Combination
from tests.harness.fork_server import ForkServer, OnRankFailure
from tests.harness.random_text import data_flags

STANDS_BY = "stands by"
"""Where a rank leaves its training once the others that replay have left theirs."""
W = 3
TARGET = 9
"""Behind a persisted window: a ring without one has no room for the slot of S_7."""
_TIMEOUT_S = 100.0


@dataclasses.dataclass(frozen=True)
class LocalizedJob:
    """What is trained.

    Attributes:
        world_size: ranks.
        stages: of the pipeline.
        passes: forward passes of a stage in a step.
        flags: all but data and protection.
    """

    world_size: int
    stages: int
    passes: int
    flags: tuple[str, ...]

    @classmethod
    def of(
        cls, levels: str, world_size: int, stages: int, passes: int, *flags: str
    ) -> LocalizedJob:
        """Reads the levels of a combination by name; flags come after its own and win."""
        return cls(world_size, stages, passes, (*Combination.of(levels).flags, *flags))

    def stage_of(self, rank: int) -> int:
        """Returns the stage of a rank."""
        return rank // (self.world_size // self.stages)


@dataclasses.dataclass(frozen=True)
class Loss:
    """One fault, and what its recovery is to do.

    Attributes:
        lost: ranks that lose everything.
        scope: stages that replay.
        behind: ranks that are interrupted between the barrier of the step and its commit.
        torn: ranks that are interrupted in the commit.
        early: ranks that are interrupted before they take part in the gradient norm.
        rolled: ranks that roll forward.
        everybody: where all other ranks are interrupted.
        replaying: ranks that the fault finds in the replay of the step `reached`; all others stand
            by.
        reached: see there.
        kept: for each stage that goes on from what an interrupted replay had reached how many
            steps are left.
        target: the step that the recovery goes to.
        verdict: what it comes down to.
    """

    lost: tuple[int, ...] = ()
    scope: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    torn: tuple[int, ...] = ()
    early: tuple[int, ...] = ()
    rolled: int = 0
    everybody: str = f"{TARGET}:gather"
    replaying: tuple[int, ...] = ()
    reached: int = 0
    kept: Mapping[int, int] = dataclasses.field(default_factory=dict)
    target: int = TARGET
    verdict: str = "LOCALIZED"

    def restart(self, job: LocalizedJob) -> dict[str, Any]:
        """Returns where each rank leaves its training, as JSON."""
        if self.replaying:
            places = {str(rank): STANDS_BY for rank in range(job.world_size)}
            places |= {str(rank): f"{self.reached}:gather" for rank in self.replaying}
            places |= self._held_up(self.reached)
            return {"places": places, "lost": list(self.lost)}
        step = int(self.everybody.split(":")[0])
        places = {str(rank): self.everybody for rank in range(job.world_size)}
        return {"places": places | self._held_up(step), "lost": list(self.lost)}

    def _held_up(self, step: int) -> dict[str, str]:
        """Returns where ranks are interrupted that do not come to the end of a step's commit."""
        at = {"after-barrier": self.behind, "optimizers": self.torn, "prepare": self.early}
        return {str(rank): f"{step}:{place}" for place, ranks in at.items() for rank in ranks}


@dataclasses.dataclass(frozen=True)
class LocalizedRun:
    """A job that goes through losses.

    Attributes:
        server: forks its ranks.
        job: what is trained.
        text: prefix of the data.
        train_iters: the last step.
        folder: an empty one, for all that the run writes.
    """

    server: ForkServer
    job: LocalizedJob
    text: Path
    train_iters: int
    folder: Path

    def train(
        self,
        losses: Sequence[Loss] = (),
        *flags: str,
        mutation: str = "do-nothing",
        lost: LostStates = LostStates.REPLAYED,
        function: Callable[..., dict[str, Any]] | None = None,
    ) -> tuple[dict[str, Any], ...]:
        """Trains to the end; returns what each rank ends with.

        Args:
            losses: that the job goes through.
            flags: more of them; they win.
            mutation: what the ranks do wrongly.
            lost: what becomes of the states of lost ranks.
            function: of each rank, in place of `train_through`.

        Raises:
            JobFailedError: a rank failed.
        """
        from tests.harness.restart_run import train_through  # noqa: PLC0415

        protection = (
            "--moevement-strategy=moevement",
            f"--moevement-window={W}",
            "--moevement-replicas=1",
            f"--moevement-store-dir={self.folder}/store",
            f"--moevement-event-dir={self.folder}/events",
            "--moevement-run-id=test",
            "--inprocess-restart",
            *lost.flags,
        )
        argv = [
            *self.job.flags,
            *data_flags(self.text),
            f"--train-iters={self.train_iters}",
            f"--data-cache-path={self.folder}/index",
            "--moevement-no-progress-bar",
            "--inprocess-restart",
            *(protection if losses else ()),
            *flags,
        ]
        restarts = [loss.restart(self.job) for loss in losses]
        result = self.server.run(
            function or train_through,
            world_size=self.job.world_size,
            args=[argv, restarts, mutation],
            timeout_s=_TIMEOUT_S,
            on_rank_failure=OnRankFailure.STOP_JOB,
        )
        return result.check().values

    def check(self, losses: Sequence[Loss], found: Sequence[dict[str, Any]]) -> None:
        """Checks that in each recovery the stages in scope alone have replayed, and proved it.

        Raises:
            AssertionError: they have not.
        """
        ranks = range(self.job.world_size)
        plans = [self._events_of(EventName.PLAN, rank) for rank in ranks]
        recoveries = [self._events_of(EventName.RECOVERED, rank) for rank in ranks]
        for number, loss in enumerate(losses):
            fields = plans[0][number].fields
            assert all(plan[number].fields == fields for plan in plans)
            assert (fields["verdict"], fields["target"]) == (loss.verdict, loss.target)
            assert fields["scope"] == list(loss.scope)
            assert len(fields["roll_forward"]) == loss.rolled
            is_cut = number + 1 < len(losses) and losses[number + 1].replaying
            from_window = loss.target - fields["window"] if loss.scope else 0
            assert from_window >= W - 1 or not loss.scope
            for rank in ranks:
                stage = self.job.stage_of(rank)
                steps = loss.kept.get(stage, from_window) if stage in loss.scope else 0
                told = [each for each in recoveries[rank] if each.generation == number + 1]
                assert len(told) == (not is_cut)
                for event in told:
                    self._check_rank(event, steps)
                if number == len(losses) - 1:
                    done = self.train_iters - loss.target + steps
                    assert found[rank]["passes"] == done * self.job.passes
        for rank in ranks:
            for event in self._events_of(EventName.REPLAY, rank):
                assert event.fields["replay_verified"] is True
                scope = losses[event.generation - 1].scope
                assert event.fields["boundaries_equal"] > 0 or not self._compares(rank, scope)

    def _compares(self, rank: int, scope: Sequence[int]) -> bool:
        """Returns whether a rank that replays sends anything to a stage that stands by."""
        stage = self.job.stage_of(rank)
        return any(
            other in range(self.job.stages) and other not in scope
            for other in (stage - 1, stage + 1)
        )

    def _check_rank(self, event: EventRecord, steps: int) -> None:
        fields = event.fields
        assert fields["replayed_steps"] == steps
        assert fields["forward_passes"] == steps * self.job.passes
        assert fields["replay_verified"] is (True if steps else None)
        assert steps or fields["backward_passes"] == 0

    def _events_of(self, name: EventName, rank: int) -> list[EventRecord]:
        return [
            event
            for event in read_events(self.folder / "events")
            if (event.event, event.logical_rank) == (name, rank)
        ]

    def is_verified(self) -> bool:
        """Returns whether every replayed step proved to be what it was."""
        events = [
            event
            for event in read_events(self.folder / "events")
            if event.event is EventName.REPLAY
        ]
        return bool(events) and all(event.fields["replay_verified"] for event in events)


def differences(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> list[str]:
    """Returns which digests and losses differ between the ranks of two runs."""
    return [
        f"rank {rank} {what} {key}"
        for rank, (left, right) in enumerate(zip(one, other, strict=True))
        for what in ("digests", "losses")
        for key in sorted(left[what].keys() | right[what].keys())
        if left[what].get(key) != right[what].get(key)
    ]
