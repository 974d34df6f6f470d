# SPDX-License-Identifier: Apache-2.0
"""Joining the job, building Megatron's process groups, and where this process stands in them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.runtime.interrupts.host_wait import await_on_host
from megatron_moevement.runtime.interrupts.interruptible_wait import interruptibly
from megatron_moevement.runtime.interrupts.open_sockets import await_listener
from megatron_moevement.runtime.interrupts.reaper import bury
from megatron_moevement.settings.launch import Launch
from megatron_moevement.settings.parallelism import Parallelism

Groups = ProcessGroupCollection
"""Megatron's process groups by name."""


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a process stands: its coordinates in the parallel layout and the sizes of that."""

    pp: int
    dp: int
    tp: int
    ep: int
    pp_size: int
    dp_size: int
    tp_size: int
    ep_size: int

    @property
    def logical_rank(self) -> LogicalRank:
        """The position by which everything durable is keyed."""
        replica, expert = divmod(self.dp, self.ep_size)
        return LogicalRank(pp=self.pp, dp=replica, tp=self.tp, ep=expert)

    @property
    def is_last_stage(self) -> bool:
        """Whether this process computes the loss."""
        return self.pp == self.pp_size - 1

    @property
    def reads_data(self) -> bool:
        """Whether this process needs the micro-batches themselves: tokens first, labels last."""
        return self.pp == 0 or self.is_last_stage


def join_job(
    launch: Launch, backend: str, timeout: timedelta, generation: int | None = None
) -> None:
    """Joins the job's default process group; every rank of the job calls it.

    Args:
        backend: `torch.distributed` backend of the model's collectives.
        timeout: limit of every collective.
        generation: in-process restarts so far, where there can be any; then the store is hosted
            outside of the ranks, and each generation has a connection and keys of its own.
    """
    store: Any = None  # the one at MASTER_ADDR
    if generation is not None and launch.store is not None:
        host, port = launch.store
        await_listener(host, port, timeout)
        connection = interruptibly(
            lambda: dist.TCPStore(host, port, None, False, timeout)  # type: ignore[attr-defined]
        )
        own_keys = f"attempt{launch.attempt}/generation{generation}"
        store = dist.PrefixStore(own_keys, connection)  # type: ignore[attr-defined]
    elif launch.world_size == 1 and "MASTER_ADDR" not in os.environ:
        store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(
        backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout
    )


def build_groups(parallelism: Parallelism, num_layers: int) -> ProcessGroupCollection:
    """Builds Megatron's groups; every rank calls it, in the same order. Returns them by name."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallelism.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallelism.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallelism.virtual_stages(num_layers),
        expert_model_parallel_size=parallelism.expert_model_parallel_size,
        expert_tensor_parallel_size=parallelism.expert_tensor_parallel_size,
        distributed_timeout_minutes=int(max(1, parallelism.distributed_timeout_minutes)),
        # Only checkpoint formats that we don't write gather over these copies of groups, and each
        # restart would build them, and a stuck one would stay.
        create_gloo_process_groups=False,
    )
    return ProcessGroupCollection.use_mpu_process_groups()


def position() -> Position:
    """Returns where this process stands; call after `build_groups`."""
    return Position(
        pp=parallel_state.get_pipeline_model_parallel_rank(),
        dp=parallel_state.get_data_parallel_rank(),
        tp=parallel_state.get_tensor_model_parallel_rank(),
        ep=parallel_state.get_expert_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
    )


_CALLED_ALONE = frozenset(
    {"tp", "mp", "tp_cp", "dp", "dp_cp", "intra_dp_cp", "expt_dp", "intra_expt_dp", "tp_dp_cp"}
)
"""Groups with which Megatron and this package call collectives even where they have one rank."""


def connect_groups(
    groups: ProcessGroupCollection, device: torch.device, *, neighbours: bool = False
) -> None:
    """Lets each group connect its ranks, the whole job first; every rank calls it.

    NCCL connects the members of a group at their first call, and all of them must make it. In a
    recovery the first messages of a pipeline group may be those of two stages that replay, while
    the others stand by; and an abort ends no kernel where not all ranks are connected. Two groups
    never wait for each other, since all ranks connect theirs in the order of the fields.

    No abort reaches what connects. So a thread waits in which a restart interrupts nothing; where a
    member was lost, it ends with the limit of connecting (`settings/nccl_environment.py`). A group
    of one rank makes its communicator there too: the training thread may not be able to any more
    (`runtime/interrupts/group_calls.py`).

    Args:
        device: where collectives keep their tensors.
        neighbours: whether stages send each other single messages: NCCL connects the two ranks at
            the first one.

    Source: `maybe_force_nccl_backend_init` of megatron/training/inprocess_restart.py; torch's
    documentation of `batch_isend_irecv`.
    """
    members = [
        group
        for field in dataclasses.fields(groups)
        if isinstance(group := getattr(groups, field.name, None), dist.ProcessGroup)
        and (group.size() > 1 or field.name in _CALLED_ALONE)
    ]

    def connect() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread
        for group in dict.fromkeys([None, *members]):
            await_on_host(dist.all_reduce(torch.ones(1, device=device), group=group, async_op=True))
        if neighbours:
            _connect_neighbours(groups.pp, device)

    interruptibly(connect)


def _connect_neighbours(pipeline: dist.ProcessGroup, device: torch.device) -> None:
    """Lets each two neighbours of a pipeline exchange a single message, the two ends as well.

    The pairs have one order on all ranks, so they never wait for each other in a circle.

    Source: `_p2p_ops` of megatron/core/pipeline_parallel/p2p_communication.py: two stages use the
    group of the whole job as well.
    """
    size, rank = pipeline.size(), pipeline.rank()
    pairs = {tuple(sorted((stage, (stage + 1) % size))) for stage in range(size)}
    for low, high in sorted(pairs, key=lambda pair: (pair[0] % 2, pair)):
        if rank not in {low, high}:
            continue
        exchange, peer = (dist.isend, high) if rank == low else (dist.irecv, low)
        other = dist.get_global_rank(pipeline, peer)
        for group in (pipeline, dist.group.WORLD)[: 2 if size == 2 else 1]:
            await_on_host(exchange(torch.ones(1, device=device), other, group))


def leave_job(patience: timedelta = timedelta(0)) -> None:
    """Destroys all groups of this process.

    A rank that has its part of the last collective may close connections from which a peer has yet
    to read; gloo then fails on the peer. So the ranks of a job that ends well leave together.

    Args:
        patience: how long to wait for the other ranks; without them this one leaves alone.
    """
    if dist.is_initialized() and patience:
        with contextlib.suppress(dist.DistError):
            _await_all_ranks(patience)
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def abandon_groups() -> None:
    """Drops all groups of this process after an interrupt, whatever state they are in.

    Nothing may wait: their peers may be lost. The last references go to a thread that may.
    """
    distributed: Any = dist.distributed_c10d
    world = distributed._world  # noqa: SLF001  (no public list of groups)
    remains = list(world.pg_map)
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    # A fault within `init_process_group` leaves a count on the survivors only. Names of groups, and
    # so keys in the store, would differ from a spare's.
    distributed._update_default_pg(None)  # noqa: SLF001
    for known in (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.tags_to_pg,
        world.pg_coalesce_state,
    ):
        known.clear()
    distributed._unregister_all_process_groups()  # noqa: SLF001
    world.group_count = 0
    bury(remains)


def _await_all_ranks(patience: timedelta) -> None:
    """Returns when all ranks of the job have called it, on rank 0, which may host the store, last.

    Raises:
        DistError: the time is over, or the store is gone.
    """
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001  (no public way to it)
    world_size = dist.get_world_size()
    for stage in ("arrived", "left"):
        if store.add(f"moevement/leave/{stage}", 1) == world_size:
            store.set(f"moevement/leave/all_{stage}", "")
        if stage == "arrived" or dist.get_rank() == 0:
            store.wait([f"moevement/leave/all_{stage}"], patience)
