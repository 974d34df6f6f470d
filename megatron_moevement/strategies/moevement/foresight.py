# SPDX-License-Identifier: Apache-2.0
"""Foresight: the plan of a job that has not started, from its ranks built one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial

from megatron_moevement.backends.backend import BackendName
from megatron_moevement.integrations.megatron.snapshots import LiveOperators
from megatron_moevement.integrations.megatron.weightless import state_bytes
from megatron_moevement.policy.copies.retention import LAG
from megatron_moevement.policy.preflight.forecast import (
    Cluster,
    JobForecast,
    ProcessForecast,
    WindowOptions,
)
from megatron_moevement.policy.watching.schedule_maker import slot_sizes
from megatron_moevement.settings.fault_tolerance import FaultTolerance
from megatron_moevement.strategies.live_objects import LiveObjects
from megatron_moevement.strategies.moevement.opening import member_of
from megatron_moevement.strategies.moevement.protection.job_plan import (
    JobPlan,
    PlannedJob,
    plan_of,
)
from megatron_moevement.strategies.moevement.protection.members import Member
from megatron_moevement.strategies.moevement.protection.spares import Spare

_NOWHERE = ("", 0)


@dataclasses.dataclass(frozen=True)
class BuiltRank:
    """A rank as it would be built.

    Attributes:
        saving_bytes: of the copy that it writes a checkpoint from beside training.
    """

    objects: LiveObjects
    saving_bytes: int = 0


def foresee(
    settings: FaultTolerance,
    ranks: Iterable[BuiltRank],
    cluster: Cluster,
    *,
    train_iters: int,
    device: BackendName,
) -> JobForecast:
    """Plans a job as its ranks would, and forecasts what it takes.

    Args:
        ranks: ascending; one after the other is looked at.
        device: what the job computes on.
    """
    members, sizes = [], []
    for rank in ranks:
        objects = rank.objects
        live = LiveOperators(objects.chunks, objects.optimizer)
        members.append(member_of(objects, live, cluster.domain_of(objects.process)))
        sizes.append((state_bytes(objects.chunks, objects.optimizer), rank.saving_bytes))
        ends = objects.ends
    members[0] = dataclasses.replace(members[0], spares=_spares(settings, cluster, members))
    # What a job is refused for is an obstacle beside the others, and the forecast shows why.
    lenient = dataclasses.replace(
        settings, moevement_host_memory_limit_gb=None, moevement_strict_replicas=False
    )
    job = PlannedJob(lenient, members, ends, train_iters)
    plan = plan_of(job)
    limits = settings.windows[0], settings.windows[-1]
    return JobForecast(
        processes=_processes(plan, cluster, sizes),
        schedule=plan.schedule,
        replicas=(plan.placement.requested, plan.placement.replicas),
        lag=LAG,
        train_iters=train_iters,
        computes_on_host=device is BackendName.CPU,
        limit_bytes=settings.host_memory_limit_bytes,
        windows=partial(_windows, job, plan),
        holders=plan.placement.holders,
        limits=None if limits[0] == limits[1] else limits,
    )


def _windows(job: PlannedJob, plan: JobPlan) -> WindowOptions:
    """Returns what W would be chosen from, by the plan of a job that chooses."""
    is_chosen, automatic = job.settings.chooses_window, job.settings.automatic
    if not is_chosen:
        plan = plan_of(dataclasses.replace(job, settings=automatic))
    sizes = slot_sizes(plan.schedule, automatic.windows, plan.room)
    largest = {window: each.largest_bytes for window, each in sizes.items()}
    return WindowOptions(plan.schedule.window, largest, is_chosen)


def _spares(settings: FaultTolerance, cluster: Cluster, members: list[Member]) -> tuple[Spare, ...]:
    """Returns the processes without a rank that keep copies."""
    waiting = cluster.waiting(len(members)) if settings.makes_copies else ()
    return tuple(Spare(host.process, host.domain, _NOWHERE, network="") for host in waiting)


def _processes(
    plan: JobPlan, cluster: Cluster, sizes: Sequence[tuple[int, int]]
) -> tuple[ProcessForecast, ...]:
    """Forecasts each process.

    Args:
        sizes: bytes of the state of each rank, and of the copy that it saves from.
    """
    processes = []
    for host in sorted(plan.hosts, key=lambda host: host.process):
        is_rank = host.rank is not None
        state, saving = sizes[host.process] if is_rank else (0, 0)
        processes.append(
            ProcessForecast(
                host=host,
                node=cluster.node_of(host.process),
                account=plan.account_of(host),
                reserve_bytes=0 if is_rank else plan.reserve_of(host.process).total_bytes,
                state_bytes=state,
                saving_bytes=saving,
            )
        )
    return tuple(processes)
