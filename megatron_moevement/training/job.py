# SPDX-License-Identifier: Apache-2.0
"""Everything one process needs to train its part of the model, built once from the arguments."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from datetime import timedelta

import torch

from megatron_moevement.backends.backend import Backend, Collectives
from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.digest import operator_digests
from megatron_moevement.integrations.megatron.durable import DurableState
from megatron_moevement.integrations.megatron.expert_bias import PendingExpertBias
from megatron_moevement.integrations.megatron.group_keys import GatheredKeys, OwnKeys, gathered_keys
from megatron_moevement.integrations.megatron.inventory import operator_states
from megatron_moevement.integrations.megatron.model import (
    Building,
    Chunks,
    build_model,
    let_go,
)
from megatron_moevement.integrations.megatron.moe_metrics import MoEMetrics
from megatron_moevement.integrations.megatron.optimizer import SplitOptimizer, build_optimizer
from megatron_moevement.integrations.megatron.phase_timers import PhaseTimers
from megatron_moevement.integrations.megatron.pipeline_schedule import PipelineSchedule
from megatron_moevement.integrations.megatron.process_groups import (
    Groups,
    Position,
    build_groups,
    connect_groups,
    join_job,
    position,
)
from megatron_moevement.integrations.megatron.random_state import seed_everything
from megatron_moevement.integrations.megatron.router_counts import RouterCounts, moe_layers_of
from megatron_moevement.integrations.megatron.scheduler import Scheduler, build_scheduler
from megatron_moevement.integrations.megatron.step_commit import StepCommit
from megatron_moevement.integrations.megatron.transformer_config import Config, transformer_config
from megatron_moevement.integrations.megatron.transients import Transients
from megatron_moevement.policy.window.ordering import Ordering
from megatron_moevement.runtime.coordination.commit_barrier import CommitBarrier
from megatron_moevement.runtime.coordination.ledger import Ledger
from megatron_moevement.runtime.faults.fault_points import FaultPoints
from megatron_moevement.runtime.slots.store_identity import RunIdentity
from megatron_moevement.settings.architecture import layer_pattern
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.settings.launch import Launch
from megatron_moevement.settings.run import num_microbatches
from megatron_moevement.training.arguments import Arguments
from megatron_moevement.training.checkpoint_store import CheckpointStore
from megatron_moevement.training.data.batches import BatchLayout
from megatron_moevement.training.megatron_arguments import megatron_arguments
from megatron_moevement.training.model_description import model_description
from megatron_moevement.training.run_identity import agree_on_identity, checkpoint_mark

_RETAINED_LEDGER_STEPS = 64


@dataclasses.dataclass(frozen=True)
class Job:
    """The live objects of one process; `position` says which part of the job they are."""

    arguments: Arguments
    identity: RunIdentity
    backend: Backend
    device: torch.device
    launch: Launch
    position: Position
    groups: Groups
    batches: BatchLayout
    chunks: Chunks
    optimizer: SplitOptimizer
    keys: GatheredKeys
    scheduler: Scheduler
    expert_bias: PendingExpertBias
    router_counts: RouterCounts
    schedule: PipelineSchedule
    barrier: CommitBarrier
    ledger: Ledger
    commit: StepCommit
    transients: Transients
    metrics: MoEMetrics
    timers: PhaseTimers
    durable: DurableState
    checkpoints: CheckpointStore
    faults: FaultPoints

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: the vocabulary, padded."""
        return _vocab_size(self.arguments)

    def rebuild(self, build: Callable[[], Job]) -> None:
        """Becomes another part, for all who hold this one; what it had is gone before.

        Raises:
            UserError: the other one can't be built. This one is empty then.
        """
        let_go(self.chunks)
        vars(self).clear()
        gc.collect()
        vars(self).update(vars(build()))

    def digests(self) -> dict[str, str]:
        """Returns the SHA-256 of each operator's state on this rank; every rank calls it."""
        self.optimizer.complete_parameters()
        return operator_digests(operator_states(self.chunks, self.optimizer))


def build_job(arguments: Arguments, launch: Launch, backend: Backend) -> Job:
    """Joins the job and builds this rank's part of it; every rank calls it, in step.

    Raises:
        UserError: the arguments don't fit the machine.
    """
    faults = FaultPoints(arguments.fault_injection.moevement_faults, launch.rank)
    groups = join(arguments, launch, backend, faults)
    identity = agree_on_identity(arguments, backend.device(launch.local_rank))
    return build_part(arguments, identity, launch, backend, groups, faults=faults)


def join(
    arguments: Arguments,
    launch: Launch,
    backend: Backend,
    faults: FaultPoints,
    generation: int | None = None,
) -> Groups:
    """Joins the job and returns its groups; every rank calls it, in step.

    Args:
        generation: in-process restarts so far, where there can be any.

    Raises:
        UserError: the arguments don't fit the machine.
    """
    parallelism = arguments.parallelism
    device = backend.device(launch.local_rank)
    if arguments.run.deterministic_mode:
        backend.use_deterministic_kernels()
    timeout = timedelta(minutes=parallelism.distributed_timeout_minutes)
    join_job(launch, backend.collectives.value, timeout, generation)
    faults.strike_outside(FaultPoint.CONNECT)
    num_layers = int(arguments.architecture.num_layers or 0)
    groups = build_groups(parallelism, num_layers)
    if generation is not None and backend.collectives is Collectives.NCCL:
        connect_groups(groups, device, neighbours=parallelism.sends_single_messages(num_layers))
    return groups


def build_part(
    arguments: Arguments,
    identity: RunIdentity,
    launch: Launch,
    backend: Backend,
    groups: Groups,
    *,
    faults: FaultPoints,
    known: GatheredKeys | OwnKeys | None = None,
) -> Job:
    """Builds this rank's part of the job that it has joined.

    Args:
        known: `Job.keys` of a rank built before, to build this one alone; None: all build in step.
    """
    place = position()
    # The random streams fix the order of what follows.
    seed_everything(arguments.run.seed, place.pp)
    device = backend.device(launch.local_rank)
    config = _model_config(arguments, backend)
    timers = _timers(arguments, config)
    chunks = _build_chunks(arguments, config, groups, device, alone=known is not None)
    with gathered_keys(known) as keys:
        optimizer = build_optimizer(
            arguments.optimization, arguments.parallelism, arguments.precision, chunks
        )
    batches = _batches(arguments, place.dp_size)
    samples = batches.global_batch_size
    scheduler = build_scheduler(arguments.optimization, arguments.run, optimizer, samples)
    expert_bias = PendingExpertBias()
    router_counts = _router_counts(arguments, chunks, device)
    schedule = _schedule(arguments, config, chunks, optimizer, groups, expert_bias, batches)
    ledger = Ledger(_RETAINED_LEDGER_STEPS)
    layout = layout_name(arguments, launch.world_size)
    named = megatron_arguments(arguments)
    durable = DurableState(chunks, optimizer, scheduler, layout, device, named)
    return Job(
        *(arguments, identity, backend, device, launch),
        position=place,
        groups=groups,
        batches=batches,
        chunks=chunks,
        optimizer=optimizer,
        keys=keys,
        scheduler=scheduler,
        expert_bias=expert_bias,
        router_counts=router_counts,
        schedule=schedule,
        barrier=CommitBarrier(device),
        ledger=ledger,
        commit=StepCommit(optimizer, scheduler, expert_bias, router_counts, ledger, samples),
        transients=Transients(chunks, optimizer, expert_bias, router_counts),
        metrics=MoEMetrics(arguments.architecture, arguments.moe, groups, device),
        timers=timers,
        durable=durable,
        checkpoints=_checkpoint_store(arguments, identity, durable, device, faults),
        faults=faults,
    )


def _build_chunks(
    arguments: Arguments, config: Config, groups: Groups, device: torch.device, *, alone: bool
) -> Chunks:
    return build_model(
        config,
        arguments.architecture,
        arguments.parallelism,
        arguments.precision,
        groups,
        vocab_size=_vocab_size(arguments),
        seq_length=arguments.data.seq_length,
        device=device,
        building=Building.ALONE if alone else Building.TOGETHER,
    )


def _router_counts(arguments: Arguments, chunks: Chunks, device: torch.device) -> RouterCounts:
    settings, moe = arguments.fault_tolerance, arguments.moe
    layers = moe_layers_of(layer_pattern(arguments.architecture, moe))
    ordering = settings.moevement_order if settings.is_on else Ordering.INDEX
    return RouterCounts(chunks, layers, moe.num_experts or 0, ordering, device)


def _schedule(  # noqa: PLR0917  (what a pass works with)
    arguments: Arguments,
    config: Config,
    chunks: Chunks,
    optimizer: SplitOptimizer,
    groups: Groups,
    expert_bias: PendingExpertBias,
    batches: BatchLayout,
) -> PipelineSchedule:
    return PipelineSchedule(
        *(config, chunks, optimizer, groups, expert_bias),
        seq_length=arguments.data.seq_length,
        micro_batch_size=batches.micro_batch_size,
        num_microbatches=batches.num_microbatches,
    )


def _batches(arguments: Arguments, dp_size: int) -> BatchLayout:
    return BatchLayout(
        micro_batch_size=int(arguments.run.micro_batch_size or 0),
        num_microbatches=num_microbatches(arguments.run, dp_size),
        dp_size=dp_size,
    )


def _checkpoint_store(
    arguments: Arguments,
    identity: RunIdentity,
    durable: DurableState,
    device: torch.device,
    faults: FaultPoints,
) -> CheckpointStore:
    model, run = model_description(arguments), checkpoint_mark(identity)
    return CheckpointStore(arguments.checkpointing, durable, model, device, faults, run=run)


def _model_config(arguments: Arguments, backend: Backend) -> Config:
    """Returns Megatron's config; what Megatron refuses in it, the user asked for."""
    try:
        return transformer_config(
            arguments.architecture,
            arguments.moe,
            arguments.transformer,
            arguments.parallelism,
            arguments.precision,
            backend=backend.name,
            deterministic=arguments.run.deterministic_mode,
        )
    except (AssertionError, ValueError) as error:
        raise UserError(f"Megatron-Core refuses the flags: {error}") from error


def _timers(arguments: Arguments, config: Config) -> PhaseTimers:
    logging = arguments.logging
    return PhaseTimers(config, logging.timing_log_level, logging.timing_log_option)


def _vocab_size(arguments: Arguments) -> int:
    return arguments.data.padded_vocab_size(arguments.parallelism.tensor_model_parallel_size)


def layout_name(arguments: Arguments, world_size: int) -> str:
    """Returns a name of the parallel sizes: random streams belong to one of them."""
    parallelism = arguments.parallelism
    sizes = {
        "world": world_size,
        "tp": parallelism.tensor_model_parallel_size,
        "pp": parallelism.pipeline_model_parallel_size,
        "vpp": parallelism.virtual_stages(int(arguments.architecture.num_layers or 0)) or 1,
        "ep": parallelism.expert_model_parallel_size,
        "etp": parallelism.expert_tensor_parallel_size or parallelism.tensor_model_parallel_size,
    }
    return " ".join(f"{name}{size}" for name, size in sizes.items())
