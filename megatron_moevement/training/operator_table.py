# SPDX-License-Identifier: Apache-2.0
"""`--moevement-operators`: what a job with these flags captures in which slot, as JSON."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_moevement.policy.window.schedule_document import dump_schedule
from megatron_moevement.runtime.coordination.agreement import as_user_error, on_first_rank
from megatron_moevement.strategies.moevement.opening import plan_job
from megatron_moevement.training.checkpoints import write_atomically
from megatron_moevement.training.job import Job
from megatron_moevement.training.protection import live_objects_of


def write_operators(job: Job, path: Path) -> None:
    """Writes the schedule that the job captures by; every rank calls it, rank 0 writes.

    Whether the captured fits into host memory is not asked here.

    Raises:
        UserError: the file can't be written.
    """
    arguments = job.arguments
    settings = dataclasses.replace(
        arguments.fault_tolerance,
        moevement_host_memory_limit_gb=None,
        moevement_strict_replicas=False,
    )
    plan = plan_job(
        settings,
        live_objects_of(job),
        domain=job.launch.failure_domain,
        train_iters=int(arguments.run.train_iters or 0),
    )

    with as_user_error(f"--moevement-operators {path}: "):
        on_first_rank(lambda: write_atomically(path, dump_schedule(plan.schedule)), job.device)
