"""Opening: puts together what protects a job."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_moevement.integrations.megatron.freezing import FrozenWork
from megatron_moevement.integrations.megatron.snapshots import LiveOperators
from megatron_moevement.policy.copies.left_stores import adopts_in
from megatron_moevement.policy.copies.placement import Host
from megatron_moevement.policy.copies.protection_level import JobShape
from megatron_moevement.runtime.coordination.agreement import (
    AgreementError,
    all_gather_json,
    gather_together,
)
from megatron_moevement.runtime.coordination.generation import Generation
from megatron_moevement.runtime.coordination.progress import START
from megatron_moevement.runtime.observation.events import Events
from megatron_moevement.runtime.slots.identity import StoreIdentity
from megatron_moevement.runtime.stores.place import store_place
from megatron_moevement.runtime.stores.store import StoreDirectory
from megatron_moevement.runtime.upstream_log.log import UpstreamLog
from megatron_moevement.settings.fault_tolerance import FaultTolerance
from megatron_moevement.settings.faults import Place
from megatron_moevement.settings.launch import Launch
from megatron_moevement.settings.secret import SECRET_VARIABLE
from megatron_moevement.strategies.moevement.agreed_guarantee import agree_on_guarantee, judge
from megatron_moevement.strategies.moevement.capture.replica_audit import ReplicaAudit
from megatron_moevement.strategies.moevement.introduction import Introduction, introduce
from megatron_moevement.strategies.moevement.kept import Kept
from megatron_moevement.strategies.moevement.protection.host_memory import JobMemory
from megatron_moevement.strategies.moevement.protection.job_plan import (
    JobPlan,
    LogShape,
    Member,
    agree_on_plan,
    check_alike,
    plan_of,
)
from megatron_moevement.strategies.moevement.protection.kept_placement import (
    HeldRanks,
    held_ranks_document,
    keep_placement,
)
from megatron_moevement.strategies.moevement.protection.kept_store import KeptStore
from megatron_moevement.strategies.moevement.protection.protection_watch import ProtectionWatch
from megatron_moevement.strategies.moevement.protection.spare_memory import (
    SpareHolder,
    keep_for_others,
)
from megatron_moevement.strategies.moevement.protection.spares import find_spares
from megatron_moevement.strategies.moevement.sparse_checkpointing import SparseCheckpointing
from megatron_moevement.strategies.resident_state import Protected, ResidentState
from megatron_moevement.strategies.trained import Trained

_PATIENCE_WITH_THE_DYING = timedelta(seconds=5)
"""The system takes a large process apart before it frees its locks."""
_NUMBER_BYTES = 24
"""A float of 17 digits with sign and exponent."""


class MoEvement(ResidentState):
    """What a process keeps for sparse checkpointing: its store, and what `Kept` names."""

    def __init__(self, settings: FaultTolerance) -> None:
        """Begins with nothing kept.

        Args:
            settings: the flags.
        """
        self._settings = settings
        self._kept = Kept()
        self.store = self._kept.store

    def open(self, protected: Protected) -> SparseCheckpointing:
        """Returns what protects a job.

        Raises:
            UserError: on all ranks, when one can't take part: its store is another job's or in use,
                others don't reach it, or there is not enough memory.
            NotOpenedError: there is no room for its store, in a restart.
        """
        return _open(self._settings, self._kept, protected)

    def hold(self, launch: Launch, domain: str, generation: Generation) -> SpareHolder:
        """Keeps copies for the ranks from now on, where any are made."""
        return keep_for_others(self._settings, launch, domain, self._kept.store, generation)

    def renew(self) -> None:
        """Keeps the store and what the job agreed on."""
        self._kept = Kept.anew(self._kept)

    def note_outage(self, durations_s: Mapping[str, float], joined_s: float) -> None:
        """Notes what the event `recovered` tells."""
        self._kept.downtime_s, self._kept.joined_s = dict(durations_s), joined_s


def _open(settings: FaultTolerance, kept: Kept, protected: Protected) -> SparseCheckpointing:
    trained, generation = protected.trained(), protected.generation
    events, say, domain = protected.events, protected.say, protected.domain
    live = LiveOperators(trained.chunks, trained.optimizer)
    host = _host(trained, domain)
    spares = find_spares(generation) if settings.makes_copies and dist.get_rank() == 0 else ()
    own = Member(host, live.operators, _extras_bytes(trained), trained.log_bytes, spares)
    told = introduce(settings, trained, live, own)
    plan = plan_of(settings, told.members, trained.ends, protected.train_iters, generation.number)
    _agree(plan, told, trained, kept, say)
    store, held = _open_store(settings, trained, kept.store, generation, protected.saves)
    plan = keep_placement(plan, held)
    memory = JobMemory(
        *(plan, host, kept.store, store, settings.moevement_replication_interface),
        trained.device,
        generation=generation,
        pin=trained.pin,
        faults=trained.faults,
        token=told.token,
        log=_keep_log(kept, trained, plan.log_of(host)),
    )
    return SparseCheckpointing(
        trained,
        live,
        memory,
        events,
        say,
        kept=kept,
        replicas=told.replicas,
        audit=ReplicaAudit(settings.moevement_audit_interval, trained, events, say),
        protection=_watch_protection(settings, trained, plan, events, say, generation),
        frozen_work=_frozen_work(settings),
    )


def _watch_protection(  # noqa: PLR0917  (what it needs of an opening)
    settings: FaultTolerance,
    trained: Trained,
    plan: JobPlan,
    events: Events,
    say: Callable[[str], None],
    generation: Generation,
) -> ProtectionWatch:
    shape = JobShape(
        stages=trained.layout.pp,
        ends=trained.ends,
        wanted=settings.moevement_replicas,
        domains=len({host.domain for host in plan.hosts}),
        spares=generation.spares,
    )
    watch = ProtectionWatch(shape, events, say, generation.number)
    watch.begin()
    return watch


def _frozen_work(settings: FaultTolerance) -> FrozenWork:
    return FrozenWork.DROPPED if settings.moevement_no_frozen_skip else FrozenWork.SKIPPED


def _keep_log(kept: Kept, trained: Trained, shape: LogShape | None) -> UpstreamLog | None:
    """Returns the upstream log; makes it where this process is to have one and has none."""
    if kept.log is None and shape is not None:
        kept.log = UpstreamLog(
            max_steps=shape.max_steps, step_bytes=shape.step_bytes, pin=trained.pin
        )
    return kept.log


def _agree(
    plan: JobPlan,
    told: Introduction,
    trained: Trained,
    kept: Kept,
    say: Callable[[str], None],
) -> None:
    """Checks that all ranks have the same plan, and agrees on what the job may rely on.

    Says where copies are fewer than asked for, where anybody can take part, and the guarantee where
    it is another one.

    Raises:
        UnlikePlansError: on all ranks: one has another plan.
    """
    own = [plan.schedule.digest, judge(told.computations, kept)]
    digests, judged = zip(*all_gather_json(own, trained.device), strict=True)
    check_alike(digests)
    if plan.warning is not None:
        say(plan.warning)
    before = kept.guarantee
    if before is None and trained.replication_key is None:
        say(f"{SECRET_VARIABLE} is not set: what listens to the job's network can take part in it")
    guarantee = agree_on_guarantee(told.computations, judged, kept)
    if guarantee != before:
        say(f"guarantee {guarantee}")


def _open_store(
    settings: FaultTolerance,
    trained: Trained,
    kept: KeptStore,
    generation: Generation,
    saves: Sequence[Path],
) -> tuple[StoreDirectory, Sequence[HeldRanks]]:
    """Opens the stores of all ranks or none.

    Returns:
        The own store, and what each rank's holds for others.
    """
    trained.faults.strike_outside(Place.START)
    root, run_id = store_place(settings, trained.identity)
    identity = StoreIdentity(run_id, trained.identity.fingerprint)

    def open_store() -> HeldRanks:
        in_place = generation.number > 0
        adopts = adopts_in(generation.number, is_refused=settings.moevement_no_adoption)
        rank = trained.rank if adopts else None
        patience = _PATIENCE_WITH_THE_DYING if in_place else timedelta(0)
        with generation.uninterrupted():
            store = kept.open(
                root,
                identity,
                trained.process,
                rank,
                saves,
                patience=patience,
                run=trained.identity,
            )
        opened.append(store)
        return held_ranks_document(store, trained.process)

    opened: list[StoreDirectory] = []
    try:
        held = gather_together(open_store, trained.device)
    except AgreementError as error:
        raise kept.not_opened(error, generation) from error
    if settings.moevement_recover_only:
        kept.flushed = ()  # it leaves everything as it is
    return opened[0], held


def plan_job(
    settings: FaultTolerance,
    trained: Trained,
    live: LiveOperators,
    *,
    domain: str,
    train_iters: int,
) -> JobPlan:
    """Returns what the job captures and who keeps copies; every rank calls it, in step.

    Args:
        settings: the flags.
        trained: the live objects.
        live: this rank's operators.
        domain: what this process may be lost together with.
        train_iters: the last step.

    Raises:
        UserError: there are too few failure domains, or a process would take too much memory.
    """
    return agree_on_plan(
        settings,
        live,
        _host(trained, domain),
        ends=trained.ends,
        extras_bytes=_extras_bytes(trained),
        train_iters=train_iters,
        device=trained.device,
        log_bytes=trained.log_bytes,
    )


def _host(trained: Trained, domain: str) -> Host:
    return Host(trained.process, domain, trained.rank)


def _extras_bytes(trained: Trained) -> int:
    """Returns room for a slot's scalars: the same at the start and after any step."""
    return _room(json.loads(trained.scalars(START).encode()))


def _room(value: Any) -> int:
    """Returns the bytes that a JSON value takes at most, whatever its numbers are."""
    if isinstance(value, dict):
        return 2 + sum(len(name) + 4 + _room(part) for name, part in value.items())
    if isinstance(value, list):
        return 2 + sum(1 + _room(part) for part in value)
    return len(value) + 2 if isinstance(value, str) else _NUMBER_BYTES
