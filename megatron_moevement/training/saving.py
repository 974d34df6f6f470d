# SPDX-License-Identifier: Apache-2.0
"""Saving: checkpoints of a generation's training, at once or beside it, one at a time."""

from __future__ import annotations

import dataclasses
import logging
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_moevement.runtime.closing import Closing
from megatron_moevement.runtime.coordination.generation import Generation
from megatron_moevement.runtime.coordination.ledger import loss_to_hex
from megatron_moevement.runtime.coordination.progress import Progress
from megatron_moevement.runtime.observation.watch import Moment, Watch
from megatron_moevement.training.background_write import BackgroundWrite
from megatron_moevement.training.job import Job
from megatron_moevement.training.reporting.reporter import Reporter

logger = logging.getLogger(__name__)


class Saving(Closing):
    """Saves the states of one generation; the training thread of every rank, in step.

    A save in the background begins with a copy of the state, which a thread of each rank writes.
    Each vote at the commit barrier says whether its rank still writes, and after the first step of
    which none does, all ranks finish the checkpoint together.
    """

    def __init__(
        self, job: Job, reporter: Reporter, watch: Watch, generation: Generation, saved: int | None
    ) -> None:
        """Begins with nothing in flight.

        Args:
            saved: the iteration that needs no save; None: each does.
        """
        self._job = job
        self._reporter = reporter
        self._watch = watch
        self._generation = generation
        self._write: BackgroundWrite | None = None
        self.saved = saved
        """The newest iteration with a checkpoint."""

    @property
    def in_flight(self) -> bool:
        """Whether a checkpoint is begun and has no name yet; the same on all ranks."""
        return self._write is not None

    def is_writing(self) -> bool:
        """Returns whether this rank still writes its part of it."""
        return self._write is not None and not self._write.is_over

    def save(self, progress: Progress) -> None:
        """Saves a state, beside training if that is asked for; a failure is reported only."""
        if not self._job.arguments.checkpointing.async_save:
            self.save_now(progress)
        elif self._is_wanted(progress):
            self._await_former()
            self._begin(progress)

    def save_now(self, progress: Progress) -> None:
        """Saves a state before it returns, and what is in flight before that."""
        if self.in_flight:
            self.finish()
        if not self._is_wanted(progress):
            return
        iteration, began_s = progress.committed, time.perf_counter()
        self._watch.begin_save()
        failure = self._job.checkpoints.save(iteration, self._common(progress))
        self._watch.end_save()
        self._end(iteration, timedelta(seconds=time.perf_counter() - began_s), failure)

    def finish(self) -> None:
        """Waits until all ranks have written what is in flight, and gives it its name."""
        write, began_s = self._write, time.perf_counter()
        assert write is not None
        self._watch.begin_save()
        write.wait(self._watch.beat)
        failure = self._job.checkpoints.finish(write.begun, write.take)
        self._watch.end_save(write.took)
        self._write = None
        duration = timedelta(seconds=time.perf_counter() - began_s)
        self._end(write.begun.iteration, duration, failure, write.took)

    def close(self) -> None:
        """Gives up what is in flight."""
        if self._write is not None:
            self._write.close()

    def _is_wanted(self, progress: Progress) -> bool:
        is_asked_for = self._job.arguments.checkpointing.save is not None
        return is_asked_for and progress.committed != self.saved

    def _await_former(self) -> None:
        if not self.in_flight:
            return
        if dist.get_rank() == 0:
            logger.warning(
                "the save before this one is still being written: training waits for it; with a "
                "longer --save-interval it would not"
            )
        self.finish()

    def _begin(self, progress: Progress) -> None:
        iteration, began_s = progress.committed, time.perf_counter()
        self._watch.begin_save()
        begun = self._job.checkpoints.begin(iteration, self._common(progress))
        if not isinstance(begun, str):
            with self._generation.uninterrupted():
                self._write = BackgroundWrite(*begun)
        self._watch.end_save()
        duration = timedelta(seconds=time.perf_counter() - began_s)
        if isinstance(begun, str):
            self._end(iteration, duration, begun)
        else:
            self._reporter.checkpoint_begun(iteration, duration)

    def _end(
        self,
        iteration: int,
        duration: timedelta,
        failure: str | None,
        written: timedelta | None = None,
    ) -> None:
        self._reporter.checkpoint(iteration, duration, failure, written)
        if failure is None:
            self.saved = iteration
        self._watch.learn(Moment.SAVED, self._job.device)

    def _common(self, progress: Progress) -> dict[str, Any]:
        losses = self._job.ledger.losses()
        return {
            "progress": dataclasses.asdict(progress),
            "losses": {str(k): loss_to_hex(loss) for k, loss in losses.items()},
        }
