# SPDX-License-Identifier: Apache-2.0
"""Runs that are whole in memory and that this launch does not go on from: reported at its start."""

from __future__ import annotations

import logging
import socket

import torch.distributed as dist

from megatron_moevement.runtime.coordination.agreement import all_gather_json
from megatron_moevement.runtime.stores.place import store_place
from megatron_moevement.runtime.stores.run_record import LeftRun, left_runs
from megatron_moevement.training.job import Job

logger = logging.getLogger(__name__)

_SHOWN_DIFFERENCES = 4


def report_left_runs(job: Job, start: int) -> None:
    """Reports the runs of this user that no process uses; every rank calls it, in step.

    Args:
        start: the step whose state it begins with.
    """
    if not job.arguments.fault_tolerance.is_on:
        return
    root, run_id = store_place(job.arguments.fault_tolerance, job.identity)
    # The first rank of a machine looks; by name, as its process 0 may be a spare.
    machines = all_gather_json(socket.gethostname(), job.device)
    is_first = machines.index(machines[dist.get_rank()]) == dist.get_rank()
    found = left_runs(root, run_id) if is_first else ()
    own = {one.run_id: _line(job, one, start) for one in found}
    everybody = all_gather_json(own, job.device)
    if dist.get_rank() == 0:
        lines = {name: line for each in reversed(everybody) for name, line in each.items()}
        for _, line in sorted(lines.items()):
            logger.warning("%s", line)


def _line(job: Job, run: LeftRun, start: int) -> str:
    unlike = [] if run.identity is None else job.identity.differences(run.identity)
    more = len(unlike) - _SHOWN_DIFFERENCES
    shown = "; ".join(unlike[:_SHOWN_DIFFERENCES]) + (f"; {more} more" if more > 0 else "")
    differs = f", it differs in {shown}" if shown else ""
    return (
        f"begins with step {start + 1} and leaves alone run {run.run_id}, which no process uses: "
        f"step {run.step} is in the memory of {socket.gethostname()} "
        f"({run.size_bytes / 1e6:.1f} MB){differs}; launch it again as it was to go on, or remove "
        f"it with `moevement clean --run-id {run.run_id}`"
    )
