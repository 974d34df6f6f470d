# SPDX-License-Identifier: Apache-2.0
"""One training step: gradients, the barrier, the commit, and the ledger's entry of it.

Step k maps S_(k-1) to S_k. Everything before the barrier reads state and changes none; everything
that changes state is in `_commit`, which makes no collective and ends with one assignment. So a
rank is at S_(k-1) or at S_k, and one that reached S_k proves that all ranks' gradients of step k
were complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from megatron_moevement.errors import MoEvementError
from megatron_moevement.integrations.megatron.expert_bias import PendingExpertBias
from megatron_moevement.integrations.megatron.optimizer import (
    GradientStatistics,
    SplitOptimizer,
    is_finite,
)
from megatron_moevement.integrations.megatron.pipeline_schedule import MicroBatch, PipelineSchedule
from megatron_moevement.integrations.megatron.random_state import random_state
from megatron_moevement.integrations.megatron.step_commit import DecidedStep, StepCommit
from megatron_moevement.runtime.coordination.commit_barrier import (
    Agreement,
    CommitBarrier,
    StopRequest,
    Vote,
)
from megatron_moevement.runtime.coordination.ledger import LedgerEntry
from megatron_moevement.runtime.coordination.progress import Progress
from megatron_moevement.runtime.faults.fault_points import NO_FAULTS, FaultPoints, Strike
from megatron_moevement.runtime.interrupts.interruptible_wait import waited_s
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.strategies.strategy import Covered, Strategy
from megatron_moevement.training.reporting.interval import (
    NO_TOTALS,
    NONE_WANTED,
    Totals,
    WantedTotals,
)


class DivergenceError(MoEvementError, RuntimeError):
    """The gradients are not finite and no loss scaling explains it; the step is not applied."""


@dataclasses.dataclass(frozen=True)
class StepOutcome:
    """What a committed step tells the loop.

    Attributes:
        own_s: how long each rank computed, its waits for others left out; empty where that is not
            known.
        is_writing: whether any rank still writes its part of a checkpoint.
        totals: those that were wanted.
    """

    entry: LedgerEntry
    stop: StopRequest
    own_s: tuple[float, ...] = ()
    is_writing: bool = False
    totals: Totals = NO_TOTALS


class _OwnTime:
    """Measures how long this rank computes, from now on."""

    def __init__(self) -> None:
        self._began_s = time.perf_counter()
        self._waited_s = waited_s()

    def seconds(self) -> float | None:
        """Returns the time without waits for other ranks; None where nobody counts those."""
        waited_by_now_s = waited_s()
        if self._waited_s is None or waited_by_now_s is None:
            return None
        return time.perf_counter() - self._began_s - (waited_by_now_s - self._waited_s)


@dataclasses.dataclass(kw_only=True)
class TrainStep:
    """Trains one step after the other; every rank of the job calls it with the same step."""

    schedule: PipelineSchedule
    optimizer: SplitOptimizer
    expert_bias: PendingExpertBias
    barrier: CommitBarrier
    commit: StepCommit
    micro_batches: Callable[[], Iterable[MicroBatch]]
    progress: Progress
    strategy: Strategy
    uninterrupted: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    """Encloses the commit: a restart waits for its end."""
    confirm: Callable[[], None] = lambda: None
    """Called before the commit; it raises an error where the barrier may have been aborted."""
    faults: FaultPoints = NO_FAULTS

    def run(
        self,
        stop: StopRequest,
        is_writing: Callable[[], bool] = lambda: False,
        *,
        wanted: WantedTotals = NONE_WANTED,
    ) -> StepOutcome:
        """Trains the next step.

        Args:
            stop: whether this rank wants the job to end after the step.
            is_writing: returns whether it still writes its part of a checkpoint.
            wanted: what is summed over the ranks besides.

        Raises:
            DivergenceError: on all ranks, with the state unchanged.
        """
        step = self.progress.committed + 1
        strike = self.faults.of_step(step)
        random_before = random_state()
        own_time = _OwnTime()
        loss = self.schedule.forward_backward(self.micro_batches(), strike, step)
        strike(FaultPoint.PREPARE)
        statistics = self.optimizer.prepare(self.strategy.replayed_gradient_stats(step))
        if not is_finite(statistics):
            self.expert_bias.discard()
            self.commit.router_counts.discard()
            raise DivergenceError(
                f"step {step}: the gradient norm is {statistics.norm}; the step was not applied"
            )
        own_s = own_time.seconds()
        num_zeros = self.optimizer.count_zeros(statistics) if wanted.num_zeros else None
        covered = self.strategy.await_commit(step)
        strike(FaultPoint.BARRIER)
        vote = Vote(
            step=step,
            loss=None if loss is None else loss.mean,
            num_tokens=0 if loss is None else loss.num_tokens,
            found_inf=statistics.found_inf,
            grad_norm=statistics.norm,
            stop=stop,
            window_start=covered.start,
            copies=covered.copies,
            schedule=covered.schedule,
            measured=covered.measured,
            replica_rng=self.strategy.replica_rng(),
            own_s=own_s,
            is_writing=is_writing(),
        )
        agreement = self.strategy.agree_within_stage(vote) or self.barrier.wait(vote)
        strike(FaultPoint.AFTER_BARRIER)
        # Entered after the barrier's result was read: had an abort come before, it would be raised.
        with self.uninterrupted():
            self.confirm()
            entry = self._commit(statistics, agreement, random_before, covered, strike)
        strike(FaultPoint.GATHER)
        self.optimizer.gather()
        totals = Totals(num_zeros, self._norm(wanted))
        self.strategy.after_step()
        return StepOutcome(entry, agreement.stop, agreement.own_s, agreement.is_writing, totals)

    def _norm(self, wanted: WantedTotals) -> float | None:
        return self.optimizer.parameters_norm() if wanted.params_norm else None

    def _commit(
        self,
        statistics: GradientStatistics,
        agreement: Agreement,
        random_before: Mapping[str, Any],
        own: Covered,
        strike: Strike,
    ) -> LedgerEntry:
        """Changes S_(k-1) into S_k, without collectives."""
        self.strategy.enter_commit()
        decided = DecidedStep(
            dataclasses.replace(statistics, norm=agreement.grad_norm),
            agreement.loss,
            agreement.num_tokens,
            random_before,
            agreement.rng_equal,
            own.popularity,
        )
        entry, self.progress = self.commit.apply(self.progress, decided, strike)
        covered = Covered(
            agreement.window_start, agreement.copies, agreement.schedule, agreement.measured
        )
        self.strategy.commit(entry, self.progress, covered)
        return entry
