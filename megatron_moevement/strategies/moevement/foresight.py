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


def foresee(
    settings: FaultTolerance,
    ranks: Iterable[LiveObjects],
    cluster: Cluster,
    *,
    train_iters: int,
    device: BackendName,
    saving_bytes: Sequence[int] = (),
) -> JobForecast:
    """Plans a job as its ranks would, and forecasts what it takes.

    Args:
        ranks: each as it would be built, ascending; one after the other is looked at.
        device: what the job computes on.
        saving_bytes: of the copy that each rank writes a checkpoint from, when all were looked at;
            empty where none is made.
    """
    members, states = [], []
    for objects in ranks:
        live = LiveOperators(objects.chunks, objects.optimizer)
        members.append(member_of(objects, live, cluster.domain_of(objects.process)))
        states.append(state_bytes(objects.chunks, objects.optimizer))
        ends = objects.ends
    members[0] = dataclasses.replace(members[0], spares=_spares(settings, cluster, members))
    # What a job is refused for is an obstacle beside the others, and the forecast shows why.
    lenient = dataclasses.replace(
        settings, moevement_host_memory_limit_gb=None, moevement_strict_replicas=False
    )
    job = PlannedJob(lenient, members, ends, train_iters)
    plan = plan_of(job)
    return JobForecast(
        processes=_processes(plan, cluster, states, saving_bytes),
        schedule=plan.schedule,
        replicas=(plan.placement.requested, plan.placement.replicas),
        lag=LAG,
        train_iters=train_iters,
        computes_on_host=device is BackendName.CPU,
        limit_bytes=settings.host_memory_limit_bytes,
        windows=partial(_windows, job, plan),
        holders=plan.placement.holders,
    )


def _windows(job: PlannedJob, plan: JobPlan) -> WindowOptions:
    """Returns what W would be chosen from, by the plan of a job that chooses."""
    is_chosen, automatic = job.settings.chooses_window, job.settings.automatic
    if not is_chosen:
        plan = plan_of(dataclasses.replace(job, settings=automatic))
    limits = range(automatic.min_window, automatic.max_window + 1)
    sizes = slot_sizes(plan.schedule, limits, plan.slot_bytes)
    largest = {window: each.largest_bytes for window, each in sizes.items()}
    return WindowOptions(automatic.first_window, largest, is_chosen)


def _spares(settings: FaultTolerance, cluster: Cluster, members: list[Member]) -> tuple[Spare, ...]:
    """Returns the processes without a rank that keep copies."""
    waiting = cluster.waiting(len(members)) if settings.makes_copies else ()
    return tuple(Spare(host.process, host.domain, _NOWHERE, network="") for host in waiting)


def _processes(
    plan: JobPlan, cluster: Cluster, states: Sequence[int], saving_bytes: Sequence[int]
) -> tuple[ProcessForecast, ...]:
    return tuple(
        ProcessForecast(
            host=host,
            node=cluster.node_of(host.process),
            account=plan.account_of(host),
            reserve_bytes=0 if host.rank is not None else plan.reserve_of(host.process).total_bytes,
            state_bytes=0 if host.rank is None else states[host.process],
            saving_bytes=0 if host.rank is None or not saving_bytes else saving_bytes[host.process],
        )
        for host in sorted(plan.hosts, key=lambda host: host.process)
    )
