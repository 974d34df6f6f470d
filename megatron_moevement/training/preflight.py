# SPDX-License-Identifier: Apache-2.0
"""Preflight: forecasts what a job with given flags takes, and finds what keeps it from working.

The backend must be installed before this module is imported.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence

from megatron_moevement.backends.backend import Backend, BackendName, Collectives
from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.group_keys import OwnKeys
from megatron_moevement.integrations.megatron.weightless import weightless_rank
from megatron_moevement.policy.copies.loopback import Receiver, check_reachable
from megatron_moevement.policy.preflight.forecast import Cluster, JobForecast
from megatron_moevement.policy.preflight.obstacles import Machine, obstacles
from megatron_moevement.runtime.faults.fault_points import FaultPoints
from megatron_moevement.runtime.observation.machine import look_at_machine
from megatron_moevement.runtime.slots.store_identity import RunIdentity
from megatron_moevement.runtime.stores.place import store_place
from megatron_moevement.runtime.stores.run_record import check_layout
from megatron_moevement.runtime.transport.interface import own_address
from megatron_moevement.settings.fault_tolerance import FaultTolerance
from megatron_moevement.settings.launch import Launch
from megatron_moevement.settings.nccl_environment import check_environment, prepare_environment
from megatron_moevement.strategies.moevement.foresight import BuiltRank, foresee
from megatron_moevement.training.arguments import Arguments
from megatron_moevement.training.job import build_part
from megatron_moevement.training.protection import live_objects_of
from megatron_moevement.training.run_identity import identify


@dataclasses.dataclass(frozen=True)
class Preflight:
    """What was found out about a job before its start.

    Attributes:
        machine: this one; None where the nodes are others.
        addresses: where the processes of a node receive copies; empty where the nodes are others.
        obstacles: why the job can't work, a sentence each.
    """

    forecast: JobForecast
    machine: Machine | None
    addresses: tuple[str, ...]
    obstacles: tuple[str, ...]


def preflight(
    arguments: Arguments,
    cluster: Cluster,
    backend: Backend,
    *,
    device: BackendName,
    is_here: bool,
) -> Preflight:
    """Looks at a job before its start; nothing of it is started, and nothing is written.

    Args:
        device: what the job computes on, which this machine may lack.
        is_here: whether every node of the job is like this machine.

    Raises:
        UserError: the data can't be read, or Megatron-Core refuses the flags.
    """
    settings = arguments.fault_tolerance
    identity = identify(arguments)
    forecast = foresee(
        settings,
        _ranks(arguments, identity, cluster, backend),
        cluster,
        train_iters=int(arguments.run.train_iters or 0),
        device=device,
    )
    if not is_here:
        return Preflight(forecast, None, (), obstacles(forecast, None))
    root, run_id = store_place(settings, identity)
    machine = look_at_machine(root, run_id)
    addresses: list[str] = []
    refused = _refusals(
        lambda: check_layout([root / run_id], identity),
        lambda: addresses.extend(_addresses(settings, cluster)),
        lambda: _check_reachable(addresses, cluster),
        lambda: _check_environment(arguments, backend),
    )
    found = (*obstacles(forecast, machine), *refused)
    return Preflight(forecast, machine, tuple(addresses), found)


def _refusals(*checks: Callable[[], object]) -> Iterator[str]:
    """Yields for what users can mend, of all that the job itself would check."""
    for check in checks:
        try:
            check()
        except UserError as error:
            yield from error.messages


def _ranks(
    arguments: Arguments, identity: RunIdentity, cluster: Cluster, backend: Backend
) -> Iterator[BuiltRank]:
    """Yields what each rank would train, built without memory for it, one after the other."""
    saving = arguments.checkpointing
    layers = int(arguments.architecture.num_layers or 0)
    size = arguments.world_size
    for rank in range(size):
        device = 0  # of this machine, if it has one
        launch = Launch(rank, device, size, process=rank, processes=cluster.processes)
        faults = FaultPoints((), rank)
        with weightless_rank(rank, size, arguments.parallelism, layers, backend.name) as groups:
            part = build_part(
                *(arguments, identity, launch, backend, groups), faults=faults, known=OwnKeys.ALONE
            )
            saves_beside = saving.async_save and saving.save is not None
            saving_bytes = part.durable.size_bytes() if saves_beside else 0
            yield BuiltRank(live_objects_of(part), saving_bytes)


def _addresses(settings: FaultTolerance, cluster: Cluster) -> Iterator[str]:
    """Yields where each process of a node receives copies.

    Raises:
        UserError: an interface is none of this machine's.
    """
    for local in range(cluster.per_node if settings.makes_copies else 0):
        yield own_address(settings.of_process(local).moevement_replication_interface)


def _check_reachable(addresses: Sequence[str], cluster: Cluster) -> None:
    """Checks that nodes reach each other there.

    Raises:
        UserError: they don't.
    """
    places = enumerate(list(addresses) * cluster.nodes)
    check_reachable([Receiver(one, str(cluster.node_of(one)), place) for one, place in places])


def _check_environment(arguments: Arguments, backend: Backend) -> None:
    """Checks the variables of this environment, as the job finds them.

    Raises:
        UserError: restarts in place would not work.
    """
    restart = arguments.restart
    if restart.inprocess_restart and backend.collectives is Collectives.NCCL:
        environment = dict(os.environ)
        prepare_environment(restart, environment)
        check_environment(restart, arguments.parallelism.distributed_timeout_minutes, environment)
