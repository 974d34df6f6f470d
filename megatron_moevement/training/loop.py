# SPDX-License-Identifier: Apache-2.0
"""The training loop: step, report, evaluate, save, stop."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.datasets import Datasets
from megatron_moevement.policy.recovery.lifecycle import Event
from megatron_moevement.policy.watching.slow_ranks import SlowRankWatch
from megatron_moevement.runtime.coordination.commit_barrier import StopRequest
from megatron_moevement.runtime.coordination.generation import Generation
from megatron_moevement.runtime.observation.events import EventName
from megatron_moevement.runtime.observation.watch import Moment, Watch
from megatron_moevement.settings.run import Run
from megatron_moevement.strategies.strategy import Recovered, Strategy
from megatron_moevement.training.banner import introduce
from megatron_moevement.training.ending import Ending, reason_to_stop
from megatron_moevement.training.evaluation import evaluate
from megatron_moevement.training.fault_injection import injected_faults, tell_what_lies_behind
from megatron_moevement.training.job import Job
from megatron_moevement.training.profiling import Profiling
from megatron_moevement.training.reported_job import reporter_everywhere
from megatron_moevement.training.reporting.interval import NONE_WANTED, WantedTotals
from megatron_moevement.training.reporting.memory import memory_line
from megatron_moevement.training.reporting.reporter import Reporter
from megatron_moevement.training.resident import Resident
from megatron_moevement.training.saving import Saving
from megatron_moevement.training.starting import protect, start_from
from megatron_moevement.training.step import StepOutcome, TrainStep
from megatron_moevement.training.steps import build_datasets, open_steps
from megatron_moevement.training.stop_request import StopSources


def train(job: Job, stop: StopSources, resident: Resident, generation: Generation) -> Ending:
    """Trains a job to its end, or until it is asked to stop; every rank calls it.

    After a restart every rank calls it again, survivors with the same objects.

    Args:
        job: may be built anew.

    Returns:
        How its training ended. What it reached is saved if the job saves at all.

    Raises:
        UserError: the data or the checkpoint don't fit the arguments, or a state is to be recovered
            and saved and that can't be done.
        DivergenceError: the gradients are not finite; nothing of that step was applied.
    """
    recover_only = job.arguments.fault_tolerance.moevement_recover_only
    is_first = generation.number == 0  # later a save that fails ends nobody
    if is_first and not recover_only:  # which writes nothing where there is nothing to recover
        job.checkpoints.check_writable()
    with reporter_everywhere(job, generation) as reporter:
        resident.announce(reporter.events)
        generation.observe(
            lambda phase: reporter.events.emit(
                EventName.PHASE, job.ledger.newest, phase=phase.value
            )
        )
        with injected_faults(job, reporter.events), contextlib.ExitStack() as opened:
            opened.enter_context(_collection(job.arguments.run))
            strategy, recovered = protect(job, opened, reporter, resident, generation)
            start, replayed = start_from(
                job, recovered, resident.watch, generation, is_first=is_first
            )
            tell_what_lies_behind(job, start.committed)
            if is_first:
                store, spares = resident.kept.store, generation.spares
                introduce(job, strategy, store, start=start, recovered=replayed, spares=spares)
            datasets = build_datasets(job)
            step = opened.enter_context(open_steps(job, datasets, start, strategy, generation))
            loop = TrainingLoop(
                job,
                reporter,
                datasets,
                step,
                stop,
                strategy=strategy,
                generation=generation,
                recovered=replayed,
                watch=resident.watch,
                stepped=resident.note_step,
            )
            opened.push(loop.leave)
            return loop.convert() if recover_only else loop.run()


class TrainingLoop:
    """Runs steps and what is due after each; used by the training thread of every rank."""

    def __init__(
        self,
        job: Job,
        reporter: Reporter,
        datasets: Datasets,
        step: TrainStep,
        stop: StopSources,
        *,
        strategy: Strategy,
        generation: Generation,
        recovered: Recovered | None = None,
        watch: Watch | None = None,
        stepped: Callable[[], None] = lambda: None,
    ) -> None:
        """Binds what it drives.

        Args:
            datasets: for evaluation; the step reads its own data.
            generation: in which it trains; its state is loaded or restored.
            recovered: where the state was brought back from memory: what is due after its target
                may not have been done.
            stepped: called after each step.
        """
        self._job = job
        self._reporter = reporter
        self._datasets = datasets
        self._step = step
        self._stop = stop
        self._strategy = strategy
        self._generation = generation
        self._target = target = None if recovered is None else recovered.target
        self._is_bare = recovered is not None and recovered.is_bare
        self._watch = watch or Watch()
        self._stepped = stepped
        self._train_iters = int(job.arguments.run.train_iters or 0)
        saved = step.progress.committed if target is None else None
        self._saving = generation.own(lambda: Saving(job, reporter, self._watch, generation, saved))
        factor = job.arguments.fault_tolerance.moevement_slow_rank_factor
        self._slow_ranks = SlowRankWatch(factor)
        self._why: str | None = None
        self._unreported = 0  # steps whose auxiliary losses nobody has asked for yet
        folder = job.arguments.logging.tensorboard_dir
        self._profiling = Profiling(job.arguments.profiling, job.launch.rank, job.device, folder)

    def leave(self, failure: type[BaseException] | None, *_: object) -> None:
        """Ends what is recorded of iterations.

        Args:
            failure: what ended training; None: it ended well.
        """
        if failure is None:
            self._profiling.close()
        else:
            self._profiling.drop()

    def run(self) -> Ending:
        """Trains until the last iteration or a reason to stop, and saves what it reached."""
        if self._target is not None:
            stop = self._catch_up(self._target)
            self._reporter.past_losses(self._job.ledger.losses(), self._target)
            if self._is_bare:  # before a window is persisted nothing else is near
                with self._pause():
                    self._saving.save_now(self._step.progress)
            if self._after(self._target, stop):
                return self._end()
        else:
            self._generation.advance(Event.BEGINS)
        while self._step.progress.committed < self._train_iters:
            if self.iterate():
                break
        return self._end()

    def convert(self) -> Ending:
        """Replays up to the newest step that was committed and saves its state; trains nothing.

        What is due besides after that step is left to who resumes from the checkpoint.

        Raises:
            UserError: it could not be saved.
        """
        assert self._target is not None
        self._catch_up(self._target)
        self._generation.advance(Event.ENDS)
        self._saving.save_now(self._step.progress)
        if self._saving.saved != self._target:
            raise UserError(
                f"the state of step {self._target} is not saved in "
                f"{self._job.arguments.checkpointing.save}; it is still in memory"
            )
        return Ending(self._step.progress, is_saved=True, is_reported=False)

    def _catch_up(self, target: int) -> StopRequest:
        """Replays what is to be replayed here, and waits for the ranks that replay more.

        What is due after a replayed step was done the first time.
        """
        stop = StopRequest.NONE
        lacks_steps = self._step.progress.committed < target
        self._generation.advance(Event.REPLAYS if lacks_steps else Event.STANDS_BY)
        while self._step.progress.committed < target:
            stop = self._one_step().stop
        self._generation.advance(Event.REACHED)
        self._strategy.rejoin()
        self._generation.advance(Event.BEGINS)
        self._job.metrics.forget()  # ranks that stood by have nothing to average
        self._unreported = 0
        return stop

    def _end(self) -> Ending:
        self._generation.advance(Event.ENDS)
        self._saving.save_now(self._step.progress)
        if self._step.progress.committed == self._train_iters:
            self._evaluate_at_end()
        self._watch.learn(Moment.END, self._job.device)
        if (
            self._job.arguments.checkpointing.save is None
            or self._saving.saved == self._step.progress.committed
        ):
            self._strategy.finish()
        progress = self._step.progress
        return Ending(progress, is_saved=self._saving.saved == progress.committed, why=self._why)

    def iterate(self) -> bool:
        """Trains one step and does what is due after it; returns whether the job ends here."""
        outcome = self._one_step()
        if self._saving.in_flight and not outcome.is_writing:
            with self._pause():
                self._saving.finish()
        return self._after(outcome.entry.step, outcome.stop)

    def _after(self, iteration: int, stop: StopRequest = StopRequest.NONE) -> bool:
        """Does what is due after a step; doing it again changes nothing."""
        run, save_interval = (
            self._job.arguments.run,
            self._job.arguments.checkpointing.save_interval,
        )
        if run.manual_gc_interval and iteration % run.manual_gc_interval == 0:
            gc.collect()
        evaluates = run.eval_iters and iteration % run.eval_interval == 0
        saves = save_interval is not None and iteration % save_interval == 0
        if evaluates or saves:
            with self._pause():
                if evaluates:
                    self._evaluate(iteration, iteration // run.eval_interval - 1, "validation")
                if saves:
                    self._saving.save(self._step.progress)
        self._why = reason_to_stop(run, iteration, stop)
        return self._why is not None

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        self._generation.advance(Event.PAUSES)
        yield
        self._generation.advance(Event.BEGINS)
        self._generation.ping()

    def _one_step(self) -> StepOutcome:
        started_s, began_s = time.perf_counter(), time.time()
        self._watch.begin_step()
        self._profiling.begin_step(self._step.progress.committed)
        wanted = self._wanted_totals(self._step.progress.committed + 1)
        outcome = self._step.run(self._stop.request(), self._saving.is_writing, wanted=wanted)
        self._profiling.end_step(outcome.entry.step)
        # Not before the first step, which compiles and loads what the later ones use.
        self._generation.ping()
        self._watch.end_step()
        self._stepped()
        duration = timedelta(seconds=time.perf_counter() - started_s)
        ended_s = time.time()
        self._unreported += 1
        if self._is_reported(outcome.entry.step):
            self._report(outcome, duration, began_s, ended_s)
        return outcome

    def _is_reported(self, iteration: int) -> bool:
        """Returns whether an iteration is new: a replayed one was reported the first time."""
        return self._target is None or iteration > self._target

    def _wanted_totals(self, iteration: int) -> WantedTotals:
        """Returns what is summed for the report of an iteration; the same on every rank.

        Nothing in a replay: a stage that replays alone would wait for the others.
        """
        if not (self._is_reported(iteration) and self._reporter.wants_collected(iteration)):
            return NONE_WANTED
        config = self._job.arguments.logging
        return WantedTotals(config.log_num_zeros_in_grad, config.log_params_norm)

    def _report(
        self, outcome: StepOutcome, duration: timedelta, began_s: float, ended_s: float
    ) -> None:
        iteration = outcome.entry.step
        auxiliary = None
        if self._reporter.wants_collected(iteration):
            passes = self._unreported * self._job.batches.num_microbatches
            auxiliary = self._job.metrics.collect(passes)
            self._unreported = 0
        self._reporter.step(
            *(outcome.entry, self._step.progress, duration),
            *(auxiliary, self._strategy.costs()),
            began_s=began_s,
            ended_s=ended_s,
            totals=outcome.totals,
        )
        self._slow_ranks, changed = self._slow_ranks.after(outcome.own_s)
        for one in changed:
            self._reporter.slow_rank(iteration, one)
        log_interval = self._job.arguments.logging.log_interval
        if iteration % log_interval == 0:
            self._reporter.phase_times(self._job.timers.report(log_interval))
        self._report_memory(iteration)

    def _report_memory(self, iteration: int) -> None:
        config = self._job.arguments.logging
        is_due = config.log_memory_interval and iteration % config.log_memory_interval == 0
        if is_due and self._job.position.dp == 0:
            rank, of_all = self._job.launch.rank, config.log_device_memory_used
            line = memory_line(rank, iteration, self._job.device, of_all_processes=of_all)
            self._reporter.print_line(line)

    def _evaluate_at_end(self) -> None:
        run = self._job.arguments.run
        if run.eval_iters:
            rounds = self._train_iters // run.eval_interval
            self._evaluate(self._train_iters, rounds, "validation", is_final=True)
            self._evaluate(self._train_iters, 0, "test", is_final=True)

    def _evaluate(
        self, iteration: int, round_number: int, split: str, *, is_final: bool = False
    ) -> None:
        dataset = self._datasets.valid if split == "validation" else self._datasets.test
        if dataset is None:
            return
        started_s = time.perf_counter()
        loss = evaluate(
            self._job,
            dataset,
            iterations=self._job.arguments.run.eval_iters,
            round_number=round_number,
            watch=self._watch,
        )
        duration = timedelta(seconds=time.perf_counter() - started_s)
        self._reporter.evaluation(iteration, split, loss, duration, is_final=is_final)


@contextlib.contextmanager
def _collection(run: Run) -> Iterator[None]:
    """Has garbage collected by the steps of the job alone, where that is asked for."""
    if not run.manual_gc:
        yield
        return
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
