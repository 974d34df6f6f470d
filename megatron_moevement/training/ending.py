# SPDX-License-Identifier: Apache-2.0
"""Why a job ends, and what to do then."""

from __future__ import annotations

import dataclasses
import logging

import torch.distributed as dist

from megatron_moevement.runtime.coordination.commit_barrier import StopRequest
from megatron_moevement.runtime.coordination.progress import Progress
from megatron_moevement.settings.run import Run
from megatron_moevement.training.job import Job

logger = logging.getLogger(__name__)

_STOPS = {StopRequest.SIGNAL: "SIGTERM", StopRequest.DURATION: "--exit-duration-in-mins"}


def reason_to_stop(run: Run, iteration: int, stop: StopRequest) -> str | None:
    """Returns why the job ends after an iteration; None where it does not."""
    if stop is not StopRequest.NONE:
        return _STOPS[stop]
    if run.exit_interval is not None and iteration % run.exit_interval == 0:
        return f"--exit-interval {run.exit_interval}"
    return None


@dataclasses.dataclass(frozen=True)
class Ending:
    """How the training of a job ends.

    Attributes:
        is_saved: whether its state is saved.
        why: there is no other step; None: it was the last.
        is_reported: whether the user gets a line of it.
    """

    progress: Progress
    is_saved: bool
    why: str | None = None
    is_reported: bool = True


def report_end(job: Job, ending: Ending) -> None:
    """Gives the user the reason of an end, and what to do where there is more to train.

    Args:
        job: ends, on all ranks; nothing is left to do.
    """
    if dist.get_rank() != 0 or not ending.is_reported:
        return
    committed, why, is_saved = ending.progress.committed, ending.why, ending.is_saved
    last, where = job.arguments.run.train_iters, job.arguments.checkpointing.save
    line = f"done: iteration {committed} of {last} is trained"
    if committed < int(last or 0):
        state = "saved nowhere (no --save)"
        if where is not None:
            state = f"saved in {where}" if is_saved else f"not saved in {where}, see above"
        line = (
            f"ends after iteration {committed} of {last} by {why}; its state is {state}; "
            "launch it again to go on"
        )
    logger.info("%s", line)
