"""Opening: puts together what protects a job."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.freezing import FrozenWork
from megatron_moevement.integrations.megatron.snapshots import LiveOperators
from megatron_moevement.policy.placement import Host
from megatron_moevement.runtime.agreement import AgreementError, together
from megatron_moevement.runtime.events import Events
from megatron_moevement.runtime.generation import Generation
from megatron_moevement.runtime.progress import START
from megatron_moevement.runtime.slots.identity import StoreIdentity
from megatron_moevement.runtime.slots.store import StoreDirectory, default_store_dir
from megatron_moevement.runtime.upstream_log import UpstreamLog
from megatron_moevement.settings.fault_tolerance import FaultTolerance
from megatron_moevement.strategies.guarantee import agree_on_guarantee
from megatron_moevement.strategies.job_plan import JobPlan, agree_on_plan
from megatron_moevement.strategies.kept import Kept
from megatron_moevement.strategies.kept_store import KeptStore
from megatron_moevement.strategies.memory import JobMemory
from megatron_moevement.strategies.moevement import SparseCheckpointing
from megatron_moevement.strategies.reachability import check_interface
from megatron_moevement.strategies.replicas import find_replicas
from megatron_moevement.strategies.trained import Trained

_RUN_ID_DIGITS = 16
_NUMBER_BYTES = 24
"""A float of 17 digits with sign and exponent."""


def store_place(settings: FaultTolerance, fingerprint: str) -> tuple[Path, str]:
    """Returns the store directory, and the name under which a run has its folder in it.

    Args:
        settings: the flags.
        fingerprint: digest of every flag that decides bits.
    """
    root = Path(settings.moevement_store_dir or default_store_dir())
    return root, settings.moevement_run_id or fingerprint[:_RUN_ID_DIGITS]


def open_sparse_checkpointing(
    settings: FaultTolerance,
    trained: Trained,
    events: Events,
    *,
    kept: Kept,
    generation: Generation,
    domain: str,
    train_iters: int,
    say: Callable[[str], None],
    saves: Sequence[Path] = (),
) -> SparseCheckpointing:
    """Returns what protects a job; every rank calls it, in step. Close it.

    Args:
        settings: the flags.
        trained: the live objects.
        events: told of windows, plans and replays.
        kept: what this process takes over a restart; gets the upstream log.
        generation: owns threads and connections.
        domain: what this process may be lost together with.
        train_iters: the last step.
        say: tells the user a line, on one rank.
        saves: folders of durable checkpoints, beside which stores may have been flushed.

    Raises:
        UserError: on all ranks, when one can't take part: its store is another job's or in use,
            others don't reach it, or there is not enough memory.
    """
    live = LiveOperators(trained.chunks, trained.optimizer)
    plan = plan_job(settings, trained, live, domain=domain, train_iters=train_iters)
    if plan.placement.warning is not None:
        say(plan.placement.warning)
    before = kept.guarantee
    guarantee = agree_on_guarantee(trained.computation, kept, trained.device)
    if guarantee != before:
        say(f"guarantee {guarantee}")
    store = _open_store(settings, trained, kept.store, generation, saves)
    shape = plan.log_of(_host(trained, domain))
    if kept.log is None and shape is not None:
        kept.log = UpstreamLog(
            max_steps=shape.max_steps, step_bytes=shape.step_bytes, pin=trained.pin
        )
    memory = JobMemory(
        plan,
        _host(trained, domain),
        kept.store,
        store,
        settings.moevement_replication_interface,
        trained.device,
        generation=generation,
        pin=trained.pin,
        faults=trained.faults,
        log=kept.log,
    )
    work = FrozenWork.DROPPED if settings.moevement_no_frozen_skip else FrozenWork.SKIPPED
    replicas = find_replicas(settings, trained, live)
    return SparseCheckpointing(
        trained, live, memory, events, say, kept=kept, replicas=replicas, frozen_work=work
    )


def _open_store(
    settings: FaultTolerance,
    trained: Trained,
    kept: KeptStore,
    generation: Generation,
    saves: Sequence[Path],
) -> StoreDirectory:
    """Opens the stores of all ranks or none, where they reach each other."""
    check_interface(settings.moevement_replication_interface, trained.process, trained.device)
    root, run_id = store_place(settings, trained.fingerprint)
    identity = StoreIdentity(run_id, trained.fingerprint)

    def open_store() -> StoreDirectory:
        rank = trained.rank if generation.number == 0 else None
        with generation.uninterrupted():  # half adopted, the files would be lost
            return kept.open(root, identity, trained.process, rank, saves)

    try:
        store = together(open_store, trained.device)
    except AgreementError as error:
        raise UserError(error.reason) from error
    if settings.moevement_recover_only:
        kept.flushed = ()  # it leaves everything as it is
    return store


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
