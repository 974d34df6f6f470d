# SPDX-License-Identifier: Apache-2.0
"""Protection: makes the strategy of a job from its arguments."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import logging
import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_moevement.backends.backend import BackendName
from megatron_moevement.integrations.megatron.boundary_log import log_bytes
from megatron_moevement.policy.job.guarantee import (
    Computation,
    DeviceKind,
    Kernels,
    deciding_variables,
)
from megatron_moevement.policy.job.ranks import Layout
from megatron_moevement.policy.job.segments import Ends
from megatron_moevement.policy.outcome.account import RecoveryAccount
from megatron_moevement.policy.window.weight_gradients import ExpertKernels
from megatron_moevement.runtime.coordination.generation import Generation
from megatron_moevement.runtime.observation.events import Events
from megatron_moevement.runtime.observation.notices import Notices
from megatron_moevement.strategies.live_objects import LiveObjects
from megatron_moevement.strategies.resident_state import Protected, ResidentState
from megatron_moevement.strategies.strategy import Strategy
from megatron_moevement.training.job import Job

logger = logging.getLogger(__name__)

_KERNEL_LIBRARIES = ("apex", "flash_attn", "flash_attn_3", "transformer_engine")


@contextlib.contextmanager
def open_strategy(
    job: Job,
    events: Events,
    carried: ResidentState,
    generation: Generation,
    recovered: Callable[[RecoveryAccount], None] = lambda account: None,
) -> Iterator[Strategy]:
    """Yields what protects a job for a generation; every rank calls it, in step.

    What it keeps in memory stays for the next launch, unless the job finished or Ctrl-C ended it.

    Args:
        events: told of windows, plans and replays.
        recovered: is given each recovery.

    Raises:
        UserError: there is not enough memory, or what lies there is another job's.
    """
    settings = job.arguments.fault_tolerance
    saving = job.arguments.checkpointing
    protected = Protected(
        lambda: live_objects_of(job),
        events,
        generation,
        domain=settings.moevement_failure_domain or job.launch.failure_domain,
        train_iters=int(job.arguments.run.train_iters or 0),
        notices=first_rank_notices(),
        recovered=recovered,
        saves=[Path(one) for one in dict.fromkeys((saving.save, saving.load)) if one is not None],
    )
    strategy = carried.open(protected)
    try:
        yield strategy
    except KeyboardInterrupt:
        if not settings.moevement_recover_only:
            strategy.finish()
        raise
    finally:
        strategy.close()


def live_objects_of(job: Job) -> LiveObjects:
    """Returns what a strategy protects of a job."""
    arguments = job.arguments
    layout = _layout(job)
    untied = arguments.architecture.untie_embeddings_and_output_weights
    return LiveObjects(
        chunks=job.chunks,
        optimizer=job.optimizer,
        scheduler=job.scheduler,
        ledger=job.ledger,
        rank=layout.rank_at(job.launch.rank),
        process=job.launch.process,
        layout=layout,
        ends=Ends.INDEPENDENT if untied or layout.pp == 1 else Ends.TIED,
        identity=job.identity,
        device=job.device,
        copy_stream=job.backend.copy_stream,
        pin=job.backend.pin,
        faults=job.faults,
        schedule=job.schedule,
        groups=job.groups,
        commit=job.commit,
        transients=job.transients,
        backend=job.backend.name,
        log_bytes=_log_bytes(job),
        patience=timedelta(minutes=arguments.parallelism.distributed_timeout_minutes),
        computation=_computation(job),
        host=socket.gethostname(),
        expert_kernels=_expert_kernels(job),
        replication_key=_replication_key(job),
    )


def _expert_kernels(job: Job) -> ExpertKernels:
    """Returns what kernels leave out: on a GPU one grouped GEMM computes a layer's experts."""
    is_grouped = job.arguments.moe.moe_grouped_gemm
    on_gpu = job.backend.name is BackendName.CUDA
    return ExpertKernels.WHOLE if is_grouped and on_gpu else ExpertKernels.EACH


def _replication_key(job: Job) -> bytes | None:
    secret = job.launch.secret
    return None if secret is None else secret.derive("replication", job.launch.attempt)


def _computation(job: Job) -> Computation:
    """Returns what decides the bits of this process besides the flags."""
    arguments = job.arguments
    return Computation(
        device=DeviceKind(job.backend.name.value),
        kernels=Kernels.DETERMINISTIC if arguments.run.deterministic_mode else Kernels.ANY,
        threads=torch.get_num_threads(),
        parts=job.backend.parts() | kernel_libraries(),
        variables=deciding_variables(os.environ),
    )


def kernel_libraries() -> dict[str, str]:
    """Returns the versions of what upstream takes kernels from wherever it is installed.

    With layers of local modules, too: optimizer, fused functions and the router's product.
    """
    found = {}
    for name in _KERNEL_LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _log_bytes(job: Job) -> int:
    """Returns what this rank logs in a step; 0 without a pipeline, or when no log is wanted."""
    if job.arguments.fault_tolerance.moevement_no_upstream_log or job.position.pp_size == 1:
        return 0
    return log_bytes(
        job.chunks[0].config,
        stage=job.position.pp,
        pp=job.position.pp_size,
        num_microbatches=job.batches.num_microbatches,
        micro_batch_size=job.batches.micro_batch_size,
        seq_length=int(job.arguments.data.seq_length),
    )


def _layout(job: Job) -> Layout:
    """Returns the sizes of the job.

    Where experts are not split as the rest is, expert parallelism does not divide data
    parallelism; all ranks that share data are then one dimension.
    """
    place = job.position
    chunks = job.arguments.parallelism.virtual_stages(
        int(job.arguments.architecture.num_layers or 0)
    )
    replicas, rest = divmod(place.dp_size, place.ep_size)
    if rest:
        replicas = place.dp_size
    return Layout(
        pp=place.pp_size,
        dp=replicas,
        tp=place.tp_size,
        ep=1 if rest else place.ep_size,
        chunks=chunks or 1,
    )


def first_rank_notices() -> Notices:
    """Returns what writes lines to the log of the first rank alone."""
    return Notices(
        say=functools.partial(_log, logging.INFO), warn=functools.partial(_log, logging.WARNING)
    )


def _log(level: int, line: str) -> None:
    if dist.get_rank() == 0:
        logger.log(level, "%s", line)
