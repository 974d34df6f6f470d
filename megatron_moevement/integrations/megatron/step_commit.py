# SPDX-License-Identifier: Apache-2.0
"""The commit of a step: everything that changes S_(k-1) into S_k, without collectives.

Training calls it behind the commit barrier. A survivor of a fault that stands behind the barrier,
but not yet behind its commit, calls it with what the ledger says: `policy/recovery/rollforward.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron_moevement.integrations.megatron.expert_bias import PendingExpertBias
from megatron_moevement.integrations.megatron.optimizer import GradientStatistics, SplitOptimizer
from megatron_moevement.integrations.megatron.router_counts import RouterCounts
from megatron_moevement.integrations.megatron.scheduler import Scheduler
from megatron_moevement.policy.window.popularity import Popularity
from megatron_moevement.runtime.coordination.ledger import Ledger, LedgerEntry
from megatron_moevement.runtime.coordination.progress import Progress
from megatron_moevement.runtime.faults.fault_points import Strike, pass_by
from megatron_moevement.settings.faults import FaultPoint


@dataclasses.dataclass(frozen=True)
class DecidedStep:
    """What all ranks know of a step that is to be applied.

    Attributes:
        num_tokens: by which the losses were normalised.
        random_before: this rank's random streams at the start of the step.
        rng_equal: whether replicas were found to have the same random streams behind it.
        popularity: what is known of the experts, in the first step of a window.
    """

    statistics: GradientStatistics
    loss: float
    num_tokens: int
    random_before: Mapping[str, Any]
    rng_equal: bool = False
    popularity: Popularity | None = None


@dataclasses.dataclass(frozen=True)
class StepCommit:
    """Applies steps; the training thread calls it, between a barrier and what follows."""

    optimizer: SplitOptimizer
    scheduler: Scheduler
    expert_bias: PendingExpertBias
    router_counts: RouterCounts
    ledger: Ledger
    global_batch_size: int

    def apply(
        self, before: Progress, decided: DecidedStep, strike: Strike = pass_by
    ) -> tuple[LedgerEntry, Progress]:
        """Applies the step after `before`; returns its ledger entry and the new progress."""
        statistics, step = decided.statistics, before.committed + 1
        loss_scale = self.optimizer.loss_scale()
        groups = self.scheduler.parameter_groups()
        strike(FaultPoint.COMMIT)
        applied = self.optimizer.commit(statistics, strike)
        strike(FaultPoint.AFTER_OPTIMIZERS)
        self.expert_bias.commit()
        self.router_counts.commit(step, begins_window=decided.popularity is not None)
        if applied:
            self.scheduler.advance(self.global_batch_size)
        entry = LedgerEntry(
            step=step,
            loss=decided.loss,
            consumed_samples=before.consumed_samples,
            loss_scale=loss_scale,
            found_inf=statistics.found_inf,
            grad_norm=statistics.norm,
            clip_factor=self.optimizer.clip_factor(statistics),
            num_tokens=decided.num_tokens,
            groups=groups,
            scalers=self.optimizer.scalers(),
            random_state=decided.random_before,
            rng_equal=decided.rng_equal,
            popularity=decided.popularity,
        )
        self.ledger.append(entry)
        progress = Progress(
            committed=step,
            consumed_samples=before.consumed_samples + self.global_batch_size,
            skipped=before.skipped + (not applied),
        )
        return entry, progress
