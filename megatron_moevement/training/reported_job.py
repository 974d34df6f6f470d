# SPDX-License-Identifier: Apache-2.0
"""What is reported of a job: its numbers and names, for the reporter of each rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatron_moevement.runtime.coordination.agreement import as_user_error, together
from megatron_moevement.runtime.coordination.generation import Generation
from megatron_moevement.runtime.stores.place import store_place
from megatron_moevement.training.job import Job
from megatron_moevement.training.reporting.flops import flops_per_iteration
from megatron_moevement.training.reporting.reporter import ReportedRun, Reporter
from megatron_moevement.training.reporting.wandb_run import WandbRun, settings_of


@contextlib.contextmanager
def reporter_everywhere(job: Job, generation: Generation) -> Iterator[Reporter]:
    """Yields the reporter of each rank, opened on all or on none: some write scalars or logs.

    Raises:
        UserError: on all ranks: it can't be opened on one.
    """

    def open_own() -> Reporter:
        return generation.own(lambda: open_reporter(job, generation.number))

    with as_user_error():
        reporter = together(open_own, job.device)
    with reporter:
        yield reporter


def open_reporter(job: Job, generation: int = 0) -> Reporter:
    """Returns what reports the job on this rank in a generation; close it."""
    arguments = job.arguments
    reported = ReportedRun(
        rank=job.launch.rank,
        world_size=job.launch.world_size,
        generation=generation,
        train_iters=int(arguments.run.train_iters or 0),
        global_batch_size=job.batches.global_batch_size,
        seq_length=arguments.data.seq_length,
        flops_per_iteration=flops_per_iteration(
            arguments.architecture,
            arguments.moe,
            seq_length=arguments.data.seq_length,
            padded_vocab_size=job.vocab_size,
            global_batch_size=job.batches.global_batch_size,
        ),
        device=job.device,
        save=arguments.checkpointing.save,
        wandb=WandbRun(_run_id(job), settings_of(arguments)),
    )
    return Reporter(arguments.logging, reported)


def _run_id(job: Job) -> str | None:
    """Returns the id of a run that a restart or a launch can go on with; None where none can."""
    arguments = job.arguments
    goes_on = (
        arguments.fault_tolerance.is_on
        or arguments.restart.inprocess_restart
        or arguments.checkpointing.load is not None
    )
    return store_place(arguments.fault_tolerance, job.identity)[1] if goes_on else None
