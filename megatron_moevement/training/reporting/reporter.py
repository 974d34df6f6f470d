# SPDX-License-Identifier: Apache-2.0
"""What one process reports while it trains: composes lines, scalars, events and the bar.

No method is a collective: the caller gives numbers that are reduced already. Every rank owns a
reporter; the last rank prints the lines and writes the scalars, rank 0 tells of checkpoints, and
every rank records its events.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping
from datetime import datetime, timedelta

import torch

from megatron_moevement.errors import UserError
from megatron_moevement.policy.outcome.account import RecoveryAccount
from megatron_moevement.policy.watching.slow_ranks import (
    QUICK_STEPS_IN_A_ROW,
    STEPS_IN_A_ROW,
    ChangedRank,
)
from megatron_moevement.runtime.closing import Closing
from megatron_moevement.runtime.coordination.ledger import LedgerEntry
from megatron_moevement.runtime.coordination.progress import NO_COSTS, IterationCosts, Progress
from megatron_moevement.runtime.observation.events import EventName, Events, open_events
from megatron_moevement.training.reporting.arguments import LoggingConfig
from megatron_moevement.training.reporting.interval import (
    LM_LOSS,
    NO_TOTALS,
    Interval,
    StepReport,
    Totals,
)
from megatron_moevement.training.reporting.iteration_line import (
    IterationReport,
    evaluation_lines,
    iteration_line,
    perplexity,
)
from megatron_moevement.training.reporting.memory import memory_scalars
from megatron_moevement.training.reporting.plots import AT_END, VALIDATION
from megatron_moevement.training.reporting.progress_bar import ProgressDisplay, open_progress
from megatron_moevement.training.reporting.progress_log import ProgressLog
from megatron_moevement.training.reporting.recovery_scalars import recovery_scalars
from megatron_moevement.training.reporting.step_scalars import scalars_over_samples
from megatron_moevement.training.reporting.wandb_run import NO_LATER_LAUNCH, WandbRun
from megatron_moevement.training.reporting.writers import ScalarWriters, open_writers

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ReportedRun:
    """What the reports say about the job and about this process's place in it.

    Attributes:
        generation: restarts before.
        wandb: the job as Weights & Biases is to show it.
    """

    rank: int
    world_size: int
    generation: int
    train_iters: int
    global_batch_size: int
    seq_length: int
    flops_per_iteration: int
    device: torch.device
    save: str | None
    wandb: WandbRun = NO_LATER_LAUNCH

    @property
    def is_last_rank(self) -> bool:
        """Whether this process prints the lines."""
        return self.rank == self.world_size - 1

    def tflops_per_gpu(self, iterations: int, duration: timedelta) -> float:
        """Returns the throughput of so many iterations, in 1e12 FLOP/s."""
        seconds = max(duration.total_seconds(), 1e-9)
        return iterations * self.flops_per_iteration / (seconds * 1e12 * self.world_size)


class Reporter(Closing):
    """Reports one generation of a job; used by the training thread of each rank.

    Raises:
        UserError: a folder can't be written or is missing, or a writer is not installed.
    """

    def __init__(self, config: LoggingConfig, run: ReportedRun) -> None:
        if config.log_progress and run.save is None:
            raise UserError(
                "--log-progress writes to the folder of the checkpoints: give --save DIR"
            )
        self._config = config
        self._run = run
        self._interval = Interval()
        self._consumed_samples = 0
        self._trained = 0
        self._training_time = timedelta()
        self._display: ProgressDisplay | None = None
        self._writers = ScalarWriters()
        self._progress_log: ProgressLog | None = None
        self._recording = config.recording(run.world_size)
        self.events: Events = open_events(
            config.moevement_event_dir, run.rank, run.generation, self._recording
        )
        try:
            if run.is_last_rank:
                self._writers = open_writers(config, run.save, run.wandb)
            if config.log_progress and run.save is not None and run.rank == 0:
                self._progress_log = ProgressLog(run.save, run.world_size)
        except BaseException:
            self.close()
            raise

    def wants_collected(self, iteration: int) -> bool:
        """Whether `step` is to be given what all ranks compute; the same answer on every rank."""
        config = self._config
        if iteration % config.log_interval == 0:
            return True
        has_writers = config.tensorboard_dir is not None or bool(config.wandb_project)
        return has_writers and iteration % config.tensorboard_log_interval == 0

    def step(
        self,
        entry: LedgerEntry,
        progress: Progress,
        duration: timedelta,
        auxiliary_losses: Mapping[str, float] | None = None,
        costs: IterationCosts = NO_COSTS,
        *,
        began_s: float | None = None,
        ended_s: float | None = None,
        totals: Totals = NO_TOTALS,
    ) -> None:
        """Reports one committed step; reporting a step again after a restart does no harm.

        Args:
            began_s: when it began, in seconds since the epoch; None: its duration before its end.
            ended_s: when it ended, in seconds since the epoch; None: just now.
            progress: how far the job is with it.
            auxiliary_losses: the routers' losses by name, means over the micro-batches.
        """
        step = StepReport(
            iteration=entry.step,
            consumed_samples=progress.consumed_samples,
            duration=duration,
            loss=entry.loss,
            auxiliary_losses=auxiliary_losses or {},
            learning_rate=entry.groups[0].lr if entry.groups else None,
            loss_scale=entry.loss_scale,
            grad_norm=entry.grad_norm,
            is_skipped=any(entry.found_inf),
            totals=totals,
        )
        self._consumed_samples = progress.consumed_samples
        self._trained += 1
        self._training_time += duration
        ended_s = time.time() if ended_s is None else ended_s
        began_s = ended_s - duration.total_seconds() if began_s is None else began_s
        self._emit_iteration(step, costs, began_s, ended_s)
        if not self._run.is_last_rank:
            return
        self._interval.add(step)
        self._write_step(step, costs)
        display = self._shown_from(entry.step - 1)
        display.advance_to(entry.step, entry.loss)
        if entry.step % self._config.log_interval == 0:
            self._end_interval(display)

    def recovery(self, account: RecoveryAccount) -> None:
        """Draws a recovery, at the step that it led to; every rank calls it."""
        self._writers.add(recovery_scalars(account), account.target)
        self._writers.flush()

    def past_losses(self, losses: Mapping[int, float], target: int) -> None:
        """Records the newest losses before a recovery again; every rank calls it.

        Processes may have died with steps that they had not recorded.

        Args:
            losses: of all steps.
            target: the newest of them.
        """
        first = max(1, target - 2 * self._recording.interval)
        told = [losses.get(step) for step in range(first, target + 1)]
        self.events.emit(EventName.LOSSES, target, losses=told)

    def slow_rank(self, iteration: int, changed: ChangedRank) -> None:
        """Reports a rank that has become slow, or quick; every rank calls it, rank 0 tells."""
        if self._run.rank != 0:
            return
        times = f"it computes {changed.own_s:.3g} s in step {iteration}, the median rank "
        times += f"{changed.median_s:.3g} s"
        if not changed.is_slow:
            steps = QUICK_STEPS_IN_A_ROW
            logger.info("rank %d is slow no more: %s, for %d steps now", changed.rank, times, steps)
            return
        self.events.emit(
            EventName.SLOW_RANK,
            iteration,
            rank=changed.rank,
            own_s=changed.own_s,
            median_s=changed.median_s,
            steps=STEPS_IN_A_ROW,
        )
        steps = STEPS_IN_A_ROW
        logger.warning("rank %d is slow: %s, for %d steps now", changed.rank, times, steps)

    def phase_times(self, text: str | None) -> None:
        """Prints the times of a step's phases; None where there is nothing to say."""
        if text is not None:
            self.print_line(text)

    def print_line(self, text: str) -> None:
        """Prints to standard output without disturbing the progress bar."""
        (self._display or ProgressDisplay()).print_line(text)

    def evaluation(
        self,
        iteration: int,
        split: str,
        loss: float,
        duration: timedelta,
        *,
        is_final: bool = False,
    ) -> None:
        """Reports the loss of one evaluation; every rank calls it, with the same loss.

        Args:
            split: `validation` or `test`.
            is_final: whether it follows the training; one on the way may be of the same iteration,
                with other samples.
        """
        duration_s = duration.total_seconds()
        fields = {"split": split, "loss": loss, "is_final": is_final, "duration_s": duration_s}
        self.events.emit(EventName.EVALUATION, iteration, **fields)
        if not self._run.is_last_rank:
            return
        self.print_line(evaluation_lines(iteration, {LM_LOSS: loss}, split if is_final else None))
        samples, name = self._consumed_samples, f"{LM_LOSS} {split}"
        if is_final and split == VALIDATION:
            name += AT_END
        self._writers.add({name: loss}, iteration, samples)
        if self._config.log_validation_ppl_to_tensorboard:
            self._writers.add({f"{name} ppl": perplexity(loss)}, iteration, samples)
        self._writers.flush()

    def checkpoint_begun(self, iteration: int, duration: timedelta) -> None:
        """Reports that a durable checkpoint is written beside training; every rank calls it.

        Args:
            duration: that training took to begin it.
        """
        duration_s = duration.total_seconds()
        self.events.emit(EventName.CHECKPOINT_BEGUN, iteration, duration_s=duration_s)
        if self._run.rank == 0:
            self.print_line(
                f"  scheduled an async checkpoint save at iteration {iteration:7d} to "
                f"{self._run.save}"
            )

    def checkpoint(
        self,
        iteration: int,
        duration: timedelta,
        failure: str | None,
        written: timedelta | None = None,
    ) -> None:
        """Reports a save of a durable checkpoint; every rank calls it.

        Args:
            duration: that training waited for it, since it was begun.
            failure: None, or why there is no such checkpoint.
            written: how long this rank wrote beside training; None: it did not.
        """
        duration_s = duration.total_seconds()
        beside = {} if written is None else {"written_s": written.total_seconds()}
        if failure is not None:
            self.events.emit(
                EventName.CHECKPOINT_FAILED,
                iteration,
                duration_s=duration_s,
                reason=failure,
                **beside,
            )
            if self._run.rank == 0:
                logger.warning("no checkpoint of iteration %d: %s", iteration, failure)
            return
        self.events.emit(EventName.CHECKPOINT_SAVED, iteration, duration_s=duration_s, **beside)
        if self._run.rank == 0:
            self.print_line(
                f"  successfully saved checkpoint from iteration {iteration:7d} to {self._run.save}"
            )
        if self._progress_log is not None:
            run = self._run
            self._progress_log.checkpoint(
                iteration,
                datetime.now(),
                job_tflops=run.tflops_per_gpu(self._trained, self._training_time),
                flops=float(iteration * run.flops_per_iteration),
                tokens=self._consumed_samples * run.seq_length,
            )

    def close(self) -> None:
        """Writes out everything and lets go of files and threads; closing twice is fine."""
        if self._display is not None:
            self._display.close()
            self._display = None
        self.events.close()
        self._writers.close()

    def _shown_from(self, start: int) -> ProgressDisplay:
        """Returns the display, which appears with the first step."""
        if self._display is None:
            hidden = self._config.moevement_no_progress_bar
            self._display = (
                ProgressDisplay() if hidden else open_progress(self._run.train_iters, start)
            )
        return self._display

    def _emit_iteration(
        self, step: StepReport, costs: IterationCosts, began_s: float, ended_s: float
    ) -> None:
        shared = {
            "loss": step.loss,
            "learning_rate": step.learning_rate,
            "loss_scale": step.loss_scale,
            "grad_norm": step.grad_norm,
            "skipped": int(step.is_skipped),
        }
        self.events.emit(
            EventName.ITERATION,
            step.iteration,
            steps=1,
            duration_s=step.duration.total_seconds(),
            began_s=began_s,
            ended_s=ended_s,
            stall_s=costs.spent.stall_s,
            captured_bytes=costs.captured_bytes,
            metadata_bytes=costs.metadata_bytes,
            replicated_bytes=costs.replicated_bytes,
            log_bytes=costs.log_bytes,
            host_bytes=costs.host_bytes,
            **dataclasses.asdict(costs.spent),
            **(shared if self._run.rank == 0 else {}),
        )

    def _write_step(self, step: StepReport, costs: IterationCosts) -> None:
        if not self._writers or step.iteration % self._config.tensorboard_log_interval:
            return
        over_samples = scalars_over_samples(
            step,
            global_batch_size=self._run.global_batch_size,
            loss_scale=self._config.log_loss_scale_to_tensorboard,
            world_size=self._run.world_size if self._config.log_world_size_to_tensorboard else None,
        )
        self._writers.add(over_samples, step.iteration, step.consumed_samples)
        scalars = dict(step.auxiliary_losses)
        if costs is not NO_COSTS:
            scalars["moevement/stall-time"] = costs.spent.stall_s
            scalars["moevement/host-bytes"] = costs.host_bytes
        if self._config.log_memory_to_tensorboard:
            scalars |= memory_scalars(self._run.device)
        self._writers.add(scalars, step.iteration)

    def _end_interval(self, display: ProgressDisplay) -> None:
        interval, newest = self._interval, self._interval.newest
        elapsed = interval.elapsed_per_iteration
        throughput = self._run.tflops_per_gpu(1, elapsed) if self._config.log_throughput else None
        report = IterationReport(
            iteration=newest.iteration,
            train_iters=self._run.train_iters,
            consumed_samples=newest.consumed_samples,
            elapsed_per_iteration=elapsed,
            tflops_per_gpu=throughput,
            learning_rate=newest.learning_rate,
            global_batch_size=self._run.global_batch_size,
            losses=interval.mean_losses(),
            loss_scale=newest.loss_scale,
            grad_norm=newest.grad_norm,
            skipped_iterations=interval.skipped,
            nan_iterations=interval.nans,
            totals=newest.totals,
        )
        display.print_line(iteration_line(report, datetime.now()))
        if self._config.log_timers_to_tensorboard:
            scalars = {"iteration-time": elapsed.total_seconds()}
            if throughput is not None:
                scalars["throughput"] = throughput
            self._writers.add(scalars, newest.iteration)
        self._writers.flush()
        interval.clear()
