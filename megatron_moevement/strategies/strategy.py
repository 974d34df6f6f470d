# SPDX-License-Identifier: Apache-2.0
"""What the training loop knows of fault tolerance: one object with these methods.

All methods are called by the training thread of every rank, in the same steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from megatron_moevement.errors import MoEvementError
from megatron_moevement.integrations.megatron.optimizer import GradientStatistics
from megatron_moevement.policy.recovery.newest_state import Durable
from megatron_moevement.policy.watching.measurements import NOT_MEASURED, Reduced
from megatron_moevement.policy.window.popularity import Popularity
from megatron_moevement.runtime.coordination.commit_barrier import (
    NO_SCHEDULE,
    Agreement,
    ReplicaRng,
    Vote,
)
from megatron_moevement.runtime.coordination.ledger import LedgerEntry
from megatron_moevement.runtime.coordination.progress import NO_COSTS, IterationCosts, Progress

NO_WINDOW = -1
"""Instead of the start of a window where there is none."""


@dataclasses.dataclass(frozen=True)
class Covered:
    """What one rank, or the whole job, could be recovered from.

    Attributes:
        start: of the newest such window; NO_WINDOW.
        copies: the fewest copies of a slot of it, besides those of the slots' own ranks.
        popularity: what is known of the experts, where the step begins a window; the same on all
            ranks.
        schedule: what says which window schedules the rank knows; of the job the greatest of each
            number.
        measured: how fast the rank copies and sends; of the job the greatest of each number.
    """

    start: int
    copies: int
    schedule: tuple[int, int] = NO_SCHEDULE
    measured: Reduced = NOT_MEASURED
    popularity: Popularity | None = None


NOT_COVERED = Covered(NO_WINDOW, 0)


class InitialStateLostError(MoEvementError, RuntimeError):
    """Training has to begin anew, and some process no longer has the weights to begin with.

    Every process raises it. The job goes on with model and optimizer that are built anew, after
    `ResidentState.renew`.
    """


class CaptureLostError(MoEvementError, RuntimeError):
    """A slot is damaged in its own ring, and the state that it captured has passed.

    The generation can't go on: no window with this slot would ever be persisted. The next one finds
    an intact copy, replays, or begins windows anew.
    """


class RecoveryAbortedError(MoEvementError, RuntimeError):
    """The plan says that the job ends; every process raises it."""


class UnverifiedReplayError(MoEvementError, RuntimeError):
    """A replay differed from the first time, though the job promised the same bits."""


class UnprovenStateError(UnverifiedReplayError):
    """No other copy is left to replay from: the job stops with its memory kept."""


@dataclasses.dataclass(frozen=True)
class Recovered:
    """A state that was recovered without a durable checkpoint.

    Attributes:
        progress: of the state that this rank goes on from; steps up to the target are replayed.
        target: T, the newest step that was committed before the fault.
        is_bare: whether nothing in memory protects that state but the processes that hold it, and
            will not before a window is persisted.
    """

    progress: Progress
    target: int
    is_bare: bool = False


@dataclasses.dataclass(frozen=True)
class StartOver:
    """Nothing was brought back: the job starts from a durable checkpoint, or from its beginning.

    Attributes:
        begin: protects the job from the progress of that state on, which is in place: model,
            optimizer and random streams. What lies in memory is forgotten in it, not before. It
            returns how far the steps after that state are known and are replayed; None: none is.
        is_continuing: whether the job has trained before, so that its own saves count.
    """

    begin: Callable[[Progress], Recovered | None] = lambda progress: None
    is_continuing: bool = False


class Strategy:
    """Protects a job; the base of all strategies, which does so by durable checkpoints alone.

    A generation begins with `recover`; where that brings nothing back the job loads or begins, and
    calls `begin` of what was returned. A strategy that brings a state back advances the generation
    by `AGREED` and `SETTLED`. Then each step calls, in this order:

    1. `replayed_gradient_stats`, after its passes, in place of a norm of all gradients;
    2. `await_commit`, `replica_rng` and, in a replay, `agree_within_stage`: what comes to the
       commit barrier;
    3. `enter_commit` and `commit`, around the change of the state, without collectives;
    4. `after_step` and `costs`.

    A recovery replays steps so until its target, and calls `rejoin` there. `finish` follows the
    last step of a job, and `close` ends each generation. A step is a replay while its number is not
    above the target that `recover` or `begin` returned.
    """

    @property
    def summary(self) -> str:
        """How it protects the job, in a few words for the user."""
        return "off: a loss costs the steps since the newest checkpoint"

    def recover(self, durable: Durable) -> Recovered | StartOver:
        """Brings back what the processes of the job hold, or an earlier launch of it left.

        Args:
            durable: what could be loaded instead.

        Returns:
            What was brought back, or how the job starts where that is nothing.

        Raises:
            InitialStateLostError: the job starts from the initial weights, and they are not there.
            RecoveryAbortedError: the job ends.
        """
        del durable
        return StartOver()

    def replayed_gradient_stats(self, step: int) -> GradientStatistics | None:
        """Returns what a replay knows of the gradients of a step; None when they speak themselves.

        While operators are frozen, no norm of all gradients can be computed.
        """
        del step
        return None

    def await_commit(self, step: int) -> Covered:
        """Waits until the state may change; returns what this rank could be recovered from."""
        del step
        return NOT_COVERED

    def replica_rng(self) -> ReplicaRng | None:
        """Returns the random streams behind the passes of a step; None: nobody wants to know."""
        return None

    def agree_within_stage(self, vote: Vote) -> Agreement | None:
        """Agrees on a replayed step within its stage; None: the whole job has to agree."""
        del vote
        return None

    def enter_commit(self) -> None:
        """Learns that the state is about to change, and is neither old nor new until `commit`."""

    def commit(self, entry: LedgerEntry, progress: Progress, covered: Covered) -> None:
        """Notes that a step is committed; called in the commit section, without collectives.

        Args:
            entry: of the step.
            progress: after the step.
            covered: the least of what the ranks returned from `await_commit`.
        """

    def after_step(self) -> None:
        """Does what takes collectives, once the parameters of the step are gathered."""

    def rejoin(self) -> None:
        """Waits until every rank has reached the target of a recovery, those that stood by, too.

        Every rank that `recover` brought to a target calls it, once it is there.
        """

    def costs(self) -> IterationCosts:
        """Returns what the last step cost."""
        return NO_COSTS

    def finish(self) -> None:
        """Lets `close` remove what is kept in memory: nobody will go on from it."""

    def close(self) -> None:
        """Ends all threads; what is kept in memory stays for the next launch."""
