# SPDX-License-Identifier: Apache-2.0
"""Opening: puts together what protects a job."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_moevement.backends.backend import Pin
from megatron_moevement.integrations.megatron.freezing import FrozenWork
from megatron_moevement.integrations.megatron.snapshots import LiveOperators
from megatron_moevement.policy.copies.left_stores import adopts_in
from megatron_moevement.policy.copies.placement import HeldCopies, Host
from megatron_moevement.policy.copies.protection_level import JobShape
from megatron_moevement.runtime.coordination.agreement import (
    AgreementError,
    gather_distinct,
    gather_read_together,
    gather_unlike,
)
from megatron_moevement.runtime.coordination.generation import Generation
from megatron_moevement.runtime.coordination.progress import START
from megatron_moevement.runtime.observation.notices import Notices
from megatron_moevement.runtime.slots.store_identity import StoreIdentity
from megatron_moevement.runtime.stores.origin_file import lacking_in
from megatron_moevement.runtime.stores.place import store_place
from megatron_moevement.runtime.stores.store import StoreDirectory
from megatron_moevement.runtime.upstream_log.log import UpstreamLog
from megatron_moevement.settings.fault_tolerance import FaultTolerance
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.settings.launch import Launch
from megatron_moevement.settings.secret import SECRET_VARIABLE
from megatron_moevement.strategies.live_objects import LiveObjects
from megatron_moevement.strategies.moevement.agreed_guarantee import agree_on_guarantee, judge
from megatron_moevement.strategies.moevement.capture.replica_audit import ReplicaAudit
from megatron_moevement.strategies.moevement.carried_state import (
    NO_PROMISE,
    CarriedState,
    Outage,
)
from megatron_moevement.strategies.moevement.introduction import Introduction, introduce
from megatron_moevement.strategies.moevement.protection.holdings import Holdings
from megatron_moevement.strategies.moevement.protection.host_memory import Endpoint, HostMemory
from megatron_moevement.strategies.moevement.protection.job_plan import (
    JobPlan,
    PlannedJob,
    agree_on_plan,
    check_alike,
    plan_of,
    shared_plan,
)
from megatron_moevement.strategies.moevement.protection.members import LogShape, Member
from megatron_moevement.strategies.moevement.protection.placement_of_holders import (
    HeldRanks,
    add_held,
    held_ranks_document,
    keep_placement,
)
from megatron_moevement.strategies.moevement.protection.protection_watch import ProtectionWatch
from megatron_moevement.strategies.moevement.protection.resident_store import ResidentStore
from megatron_moevement.strategies.moevement.protection.spares import Spare, find_spares
from megatron_moevement.strategies.moevement.schedules.popularity_watch import PopularityWatch
from megatron_moevement.strategies.moevement.schedules.schedule_changes import ScheduleChanges
from megatron_moevement.strategies.moevement.session import RankSession
from megatron_moevement.strategies.moevement.spare_memory import keep_for_others
from megatron_moevement.strategies.moevement.sparse_checkpointing import SparseCheckpointing
from megatron_moevement.strategies.moevement.tiers.tiers import open_tiers
from megatron_moevement.strategies.resident_state import IdleSpare, Protected, ResidentState

_PATIENCE_WITH_THE_DYING = timedelta(seconds=5)
"""The system takes a large process apart before it frees its locks."""
_NUMBER_BYTES = 24
"""A float of 17 digits with sign and exponent."""


class MoEvement(ResidentState):
    """What a process keeps for sparse checkpointing: its store, and what `CarriedState` names."""

    def __init__(self, settings: FaultTolerance) -> None:
        """Begins with nothing kept."""
        self._settings = settings
        self._carried = CarriedState()
        self._plan: JobPlan | None = None  # of the newest generation that agreed on one
        self.store = self._carried.store

    def open(self, protected: Protected) -> SparseCheckpointing:
        """Returns what protects a job.

        Raises:
            UserError: on all ranks, when one can't take part: its store is another job's or in use,
                others don't reach it, or there is not enough memory.
            NotOpenedError: there is no room for its store, in a restart.
        """
        settings, carried = self._settings, self._carried
        objects, generation = protected.objects(), protected.generation
        events, notices = protected.events, protected.notices
        live = LiveOperators(objects.chunks, objects.optimizer)
        spares = find_spares(generation) if settings.makes_copies and dist.get_rank() == 0 else ()
        own = member_of(objects, live, protected.domain, spares)
        former = self._plan
        told = introduce(settings, objects, live, own, None if former is None else former.basis)
        job = PlannedJob(settings, told.members, objects.ends, protected.train_iters)
        found = shared_plan(job, former, told.bases, objects.device)
        plan = plan_of(job, generation.number, former, found)
        root, run_id = store_place(settings, objects.identity)
        _agree(plan, told, objects, carried, notices, left=lacking_in(root / run_id))
        self._plan = plan
        store, held = _open_store(settings, objects, carried.store, generation, protected.saves)
        plan = keep_placement(plan, held)
        endpoint = Endpoint(
            told.token,
            objects.process,
            settings.moevement_replication_interface,
            generation,
            objects.faults,
            _keep_log(carried, objects, plan.log_of(own.host), generation),
        )
        holdings = Holdings(plan, own.host, store)
        work = FrozenWork.DROPPED if settings.moevement_no_frozen_skip else FrozenWork.SKIPPED
        memory = HostMemory(holdings, endpoint, carried.store, objects.device, objects.pin)
        popularity = PopularityWatch(
            objects.commit.router_counts, settings.moevement_order_decay, events
        )
        schedules = ScheduleChanges(
            memory,
            settings,
            events,
            notices,
            popularity=popularity,
            kernels=objects.expert_kernels,
        )
        tiers = open_tiers(settings, store.identity.run_id, objects, generation, events)
        return SparseCheckpointing(
            RankSession(
                *(objects, live, memory, carried, events, schedules),
                *(notices, protected.recovered, tiers),
            ),
            replicas=told.replicas,
            audit=ReplicaAudit(settings.moevement_audit_interval, objects, events, notices),
            protection=_watch_protection(settings, objects, plan, protected, own.host),
            frozen_work=work,
        )

    def hold(self, launch: Launch, domain: str, generation: Generation, pin: Pin) -> IdleSpare:
        """Keeps copies for the ranks from now on, where any are made."""
        store = self._carried.store
        return keep_for_others(self._settings, launch, domain, store, generation, pin=pin)

    def renew(self) -> None:
        """Keeps the store and what the job agreed on."""
        if self._carried.log is not None:
            self._carried.log.close()
        self._carried = CarriedState.anew(self._carried)

    def note_outage(self, durations_s: Mapping[str, float], joined_s: float) -> None:
        """Notes what the event `recovered` tells."""
        self._carried.outage = Outage(dict(durations_s), joined_s)


def _watch_protection(
    settings: FaultTolerance, objects: LiveObjects, plan: JobPlan, protected: Protected, own: Host
) -> ProtectionWatch:
    shape = JobShape(
        stages=objects.layout.pp,
        ends=objects.ends,
        wanted=settings.moevement_replicas,
        domains=len({host.domain for host in plan.hosts}),
        spares=protected.generation.spares,
    )
    generation = protected.generation.number
    holders = plan.placement.holders[own.occupied]
    watch = ProtectionWatch(shape, protected.events, protected.notices, generation, holders)
    watch.begin()
    return watch


def _keep_log(
    carried: CarriedState, objects: LiveObjects, shape: LogShape | None, generation: Generation
) -> UpstreamLog | None:
    """Returns the upstream log; makes it where this process is to have one and has none."""
    if carried.log is None and shape is not None:
        with generation.uninterrupted():  # or nobody would unpin what is pinned
            reserve, carried.store.log_memory = carried.store.log_memory, None
            carried.log = UpstreamLog(
                max_steps=shape.max_steps,
                step_bytes=shape.step_bytes,
                pin=objects.pin,
                reserve=reserve,
            )
    return carried.log


def _agree(
    plan: JobPlan,
    told: Introduction,
    objects: LiveObjects,
    carried: CarriedState,
    notices: Notices,
    *,
    left: Sequence[str],
) -> None:
    """Checks that all ranks have the same plan, and agrees on what the job may rely on.

    Says where copies are fewer than asked for, where anybody can take part, and the guarantee where
    it is another one.

    Args:
        left: what memory on this machine lacks, which others have computed.

    Raises:
        UnlikePlansError: on all ranks: one has another plan.
    """
    check_alike(gather_unlike(plan.schedule.digest, objects.device))
    judged = gather_distinct(judge(told.computations, carried, left), objects.device)
    if plan.warning is not None:
        notices.warn(plan.warning)
    before = carried.promise
    if before == NO_PROMISE and objects.replication_key is None:
        notices.warn(
            f"{SECRET_VARIABLE} is not set: what listens to the job's network can take part in it"
        )
    guarantee = agree_on_guarantee(told.computations, judged, carried)
    if before == NO_PROMISE or guarantee != before.guarantee:
        notices.say(f"guarantee {guarantee}")


def _open_store(
    settings: FaultTolerance,
    objects: LiveObjects,
    carried: ResidentStore,
    generation: Generation,
    saves: Sequence[Path],
) -> tuple[StoreDirectory, HeldCopies]:
    """Opens the stores of all ranks or none.

    Returns:
        The own store, and what all of them hold for others.
    """
    objects.faults.strike_outside(FaultPoint.START)
    root, run_id = store_place(settings, objects.identity)
    identity = StoreIdentity(run_id, objects.identity.fingerprint)

    def open_store() -> HeldRanks:
        in_place = generation.number > 0
        adopts = adopts_in(generation.number, is_refused=settings.moevement_no_adoption)
        rank = objects.rank if adopts else None
        patience = _PATIENCE_WITH_THE_DYING if in_place else timedelta(0)
        with generation.uninterrupted():
            store = carried.open(
                root,
                identity,
                objects.process,
                rank,
                saves,
                patience=patience,
                run=objects.identity,
            )
        opened.append(store)
        return held_ranks_document(store, objects.process)

    opened: list[StoreDirectory] = []
    held = HeldCopies()
    try:
        gather_read_together(open_store, objects.device, lambda _, told: add_held(held, told))
    except AgreementError as error:
        raise carried.not_opened(error, generation) from error
    if settings.moevement_recover_only:
        carried.flushed = ()  # it leaves everything as it is
    return opened[0], held


def plan_job(
    settings: FaultTolerance, objects: LiveObjects, *, domain: str, train_iters: int
) -> JobPlan:
    """Returns what the job captures and who keeps copies; every rank calls it, in step.

    Args:
        domain: what this process may be lost together with.

    Raises:
        UserError: there are too few failure domains, or a process would take too much memory.
    """
    own = member_of(objects, LiveOperators(objects.chunks, objects.optimizer), domain)
    return agree_on_plan(settings, own, objects.ends, train_iters, objects.device)


def member_of(
    objects: LiveObjects, live: LiveOperators, domain: str, spares: tuple[Spare, ...] = ()
) -> Member:
    """Returns this rank; a slot's scalars need the same room at the start and after any step."""
    host = Host(objects.process, domain, objects.rank)
    extras_bytes = _room(json.loads(objects.scalars(START).encode()))
    return Member.of(host, live.operators, extras_bytes, objects.log_bytes, spares)


def _room(value: Any) -> int:
    """Returns the bytes that a JSON value takes at most, whatever its numbers are."""
    if isinstance(value, dict):
        return 2 + sum(len(name) + 4 + _room(part) for name, part in value.items())
    if isinstance(value, list):
        return 2 + sum(1 + _room(part) for part in value)
    return len(value) + 2 if isinstance(value, str) else _NUMBER_BYTES
