# SPDX-License-Identifier: Apache-2.0
"""Starting: what protects a job is opened, and brings back its state; else a checkpoint does."""

from __future__ import annotations

import contextlib
import logging

import torch.distributed as dist

from megatron_moevement.errors import UserError
from megatron_moevement.policy.recovery.lifecycle import Event
from megatron_moevement.runtime.coordination.generation import Generation
from megatron_moevement.runtime.coordination.ledger import loss_from_hex
from megatron_moevement.runtime.coordination.progress import START, Progress
from megatron_moevement.runtime.observation.watch import Watch
from megatron_moevement.strategies.strategy import (
    InitialStateLostError,
    Recovered,
    StartOver,
    Strategy,
)
from megatron_moevement.training.job import Job
from megatron_moevement.training.left_runs import report_left_runs
from megatron_moevement.training.protection import open_strategy
from megatron_moevement.training.reporting.reporter import Reporter
from megatron_moevement.training.resident import Resident

logger = logging.getLogger(__name__)


def protect(
    job: Job,
    opened: contextlib.ExitStack,
    reporter: Reporter,
    resident: Resident,
    generation: Generation,
) -> tuple[Strategy, Recovered | StartOver]:
    """Opens what protects the job, and brings back what earlier generations left in memory.

    Where nothing brings back the state of survivors that have trained, the job is built again.

    Returns:
        What protects the job, and what was brought back.
    """

    def recover() -> tuple[Strategy, Recovered | StartOver]:
        own = open_strategy(job, reporter.events, resident.kept, generation, reporter.recovery)
        strategy = opened.enter_context(own)
        return strategy, strategy.recover(job.checkpoints.newest())

    with contextlib.suppress(InitialStateLostError):  # on all ranks
        strategy, recovered = recover()
        if generation.number == 0 or isinstance(recovered, Recovered):
            return strategy, recovered
        del strategy, recovered  # which hold what is built again
    opened.close()
    resident.rebuild(job)
    return recover()


def start_from(
    job: Job,
    recovered: Recovered | StartOver,
    watch: Watch,
    generation: Generation,
    *,
    is_first: bool,
) -> tuple[Progress, Recovered | None]:
    """Returns where training starts; loads a checkpoint where nothing was brought back.

    Args:
        generation: is told that one is loaded.
        is_first: whether no generation was before this one.

    Returns:
        The progress of that state, and how far it is replayed from; None: it is new.

    Raises:
        UserError: a checkpoint does not fit, or nothing was recovered where that is all to be done.
    """
    if job.arguments.fault_tolerance.moevement_recover_only:
        if isinstance(recovered, StartOver):
            raise _nothing_recovered(job.checkpoints.newest().loadable)
        job.checkpoints.check_writable()
    if isinstance(recovered, Recovered):
        return recovered.progress, recovered
    generation.advance(Event.LOADS)
    is_continuing = recovered.is_continuing or not is_first
    if is_first:
        job.checkpoints.check_room(int(job.arguments.run.train_iters or 0))
    if not is_continuing:
        job.checkpoints.begin_history()
    start = _resume(job, is_continuing=is_continuing)
    if start.committed:
        watch.loaded()
    if is_first:
        report_left_runs(job, start.committed)
    return start, recovered.begin(start)


def _nothing_recovered(durable: int) -> UserError:
    newer = f"newer than the checkpoint of step {durable} in --load" if durable else "persisted"
    return UserError(
        f"--moevement-recover-only: the processes of such a job left no window in memory that is "
        f"whole and {newer}; give the flags of the job, --moevement-store-dir and "
        "--moevement-run-id included, and start as many ranks on the same machines"
    )


def _resume(job: Job, *, is_continuing: bool) -> Progress:
    """Loads the checkpoint, if there is one, and returns where training starts."""

    def warn(message: str) -> None:
        if dist.get_rank() == 0:
            logger.warning("%s", message)

    common = job.checkpoints.resume(warn, is_continuing=is_continuing)
    if common is None:
        return START
    job.ledger.restore_losses({int(k): loss_from_hex(v) for k, v in common["losses"].items()})
    return Progress(**common["progress"])
