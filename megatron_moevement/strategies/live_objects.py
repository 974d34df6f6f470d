# SPDX-License-Identifier: Apache-2.0
"""The live objects of a rank that a strategy protects."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from megatron_moevement.backends.backend import BackendName, CopyStream, Pin
from megatron_moevement.integrations.megatron.optimizer import SplitOptimizer
from megatron_moevement.integrations.megatron.pipeline_schedule import PipelineSchedule
from megatron_moevement.integrations.megatron.process_groups import Groups
from megatron_moevement.integrations.megatron.random_state import restore_random_state
from megatron_moevement.integrations.megatron.scheduler import Scheduler
from megatron_moevement.integrations.megatron.step_commit import StepCommit
from megatron_moevement.integrations.megatron.transients import Transients
from megatron_moevement.policy.job.guarantee import Computation
from megatron_moevement.policy.job.ranks import Layout, LogicalRank
from megatron_moevement.policy.job.segments import Ends
from megatron_moevement.policy.window.weight_gradients import ExpertKernels
from megatron_moevement.runtime.coordination.ledger import Ledger
from megatron_moevement.runtime.coordination.progress import Progress
from megatron_moevement.runtime.faults.fault_points import FaultPoints
from megatron_moevement.runtime.slots.store_identity import RunIdentity
from megatron_moevement.strategies.scalars import SlotScalars


@dataclasses.dataclass(frozen=True)
class LiveObjects:
    """What a rank trains, and where it stands in the job.

    Attributes:
        optimizer: with complete state.
        scheduler: learning rate and weight decay.
        ledger: of committed steps, with every loss.
        process: number of this process in the job.
        ends: whether the first and the last stage share the embedding.
        device: where collectives keep their tensors.
        copy_stream: makes what copies to the host run on.
        pin: makes host memory a target of such copies; returns what undoes it.
        groups: the process groups, those of the present generation.
        transients: what an interrupted step leaves behind.
        log_bytes: what this rank sends over its stage's boundaries in a step; 0 without a log.
        patience: how long a rank may be waited for.
        computation: what decides the bits of this process.
        host: name of its machine.
        expert_kernels: what kernels of experts leave out in a replay, on all ranks.
        replication_key: by which processes of the job recognise each other; None where the launcher
            made no secret.
    """

    chunks: Sequence[torch.nn.Module]
    optimizer: SplitOptimizer
    scheduler: Scheduler
    ledger: Ledger
    rank: LogicalRank
    process: int
    layout: Layout
    ends: Ends
    identity: RunIdentity
    device: torch.device
    copy_stream: Callable[[], CopyStream]
    pin: Pin
    faults: FaultPoints
    schedule: PipelineSchedule
    groups: Groups
    commit: StepCommit
    transients: Transients
    backend: BackendName
    log_bytes: int
    patience: timedelta
    computation: Computation
    host: str
    expert_kernels: ExpertKernels = ExpertKernels.EACH
    replication_key: bytes | None = dataclasses.field(default=None, repr=False)

    def scalars(self, progress: Progress) -> SlotScalars:
        """Returns what belongs to the present state besides tensors."""
        return SlotScalars.of(progress, self.optimizer, self.scheduler)

    def restore(self, scalars: SlotScalars) -> None:
        """Puts back what `scalars` returned, but for the step counters, which operators have."""
        self.optimizer.load_scalers(scalars.scalers)
        self.scheduler.go_on_at(dict(scalars.scheduler))
        restore_random_state(dict(scalars.random_state))
