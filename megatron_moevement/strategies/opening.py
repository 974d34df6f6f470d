"""Opening: puts together what protects a job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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
from megatron_moevement.settings.fault_tolerance import FaultTolerance
from megatron_moevement.strategies.job_plan import JobPlan, agree_on_plan
from megatron_moevement.strategies.kept_store import KeptStore
from megatron_moevement.strategies.memory import JobMemory
from megatron_moevement.strategies.moevement import SparseCheckpointing
from megatron_moevement.strategies.trained import Trained

_RUN_ID_DIGITS = 16


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
    kept: KeptStore,
    generation: Generation,
    domain: str,
    train_iters: int,
    say: Callable[[str], None],
) -> SparseCheckpointing:
    """Returns what protects a job; every rank calls it, in step. Close it.

    Args:
        settings: the flags.
        trained: the live objects.
        events: told of windows, plans and replays.
        kept: the store of this process, which outlives the generation.
        generation: owns threads and connections.
        domain: what this process may be lost together with.
        train_iters: the last step.
        say: tells the user a line, on one rank.

    Raises:
        UserError: on all ranks, when one can't take part: its store is another job's or in use, or
            there is not enough memory.
    """
    live = LiveOperators(trained.chunks, trained.optimizer)
    if kept.extras_bytes is None:
        kept.extras_bytes = extras_bytes_of(trained)
    plan = plan_job(
        settings,
        trained,
        live,
        extras_bytes=kept.extras_bytes,
        domain=domain,
        train_iters=train_iters,
    )
    if plan.placement.warning is not None:
        say(plan.placement.warning)
    store = _open_store(settings, trained, kept, generation)
    memory = JobMemory(
        plan,
        _host(trained, domain),
        kept,
        store,
        settings.moevement_replication_interface,
        trained.device,
        generation=generation,
        pin=trained.pin,
        faults=trained.faults,
    )
    work = FrozenWork.DROPPED if settings.moevement_no_frozen_skip else FrozenWork.SKIPPED
    return SparseCheckpointing(trained, live, memory, events, say, frozen_work=work)


def _open_store(
    settings: FaultTolerance, trained: Trained, kept: KeptStore, generation: Generation
) -> StoreDirectory:
    """Opens the stores of all ranks or none."""
    root, run_id = store_place(settings, trained.fingerprint)
    identity = StoreIdentity(run_id, trained.fingerprint)

    def open_store() -> StoreDirectory:
        rank = trained.rank if generation.number == 0 else None
        return kept.open(root, identity, trained.process, rank)

    try:
        return together(open_store, trained.device)
    except AgreementError as error:
        raise UserError(error.reason) from error


def plan_job(
    settings: FaultTolerance,
    trained: Trained,
    live: LiveOperators,
    *,
    extras_bytes: int,
    domain: str,
    train_iters: int,
) -> JobPlan:
    """Returns what the job captures and who keeps copies; every rank calls it, in step.

    Args:
        settings: the flags.
        trained: the live objects.
        live: this rank's operators.
        extras_bytes: room for the scalars of a slot.
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
        extras_bytes=extras_bytes,
        train_iters=train_iters,
        device=trained.device,
    )


def _host(trained: Trained, domain: str) -> Host:
    return Host(trained.process, domain, trained.rank)


def extras_bytes_of(trained: Trained) -> int:
    """Returns room for a slot's scalars: numbers in them grow longer as training goes on.

    Nothing must have been trained yet: every rank that is built anew finds the same.
    """
    return 2 * len(trained.scalars(START).encode())
