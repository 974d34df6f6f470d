"""Sparse checkpointing: a sparse snapshot every iteration, in the memory of r + 1 processes.

Source: section 3.2 of the paper. What is decided is in `policy/`; this carries it out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from megatron_moevement.integrations.megatron.freezing import Freezing, FrozenWork
from megatron_moevement.integrations.megatron.optimizer import GradientStatistics
from megatron_moevement.integrations.megatron.slot_layout import slot_layouts
from megatron_moevement.integrations.megatron.snapshots import LiveOperators
from megatron_moevement.policy.commit import newest_persisted
from megatron_moevement.policy.plan import Plan, Verdict
from megatron_moevement.policy.ring import SlotRing
from megatron_moevement.policy.schedule import Window
from megatron_moevement.runtime.capture import Capture
from megatron_moevement.runtime.events import EventName, Events
from megatron_moevement.runtime.ledger import LedgerEntry
from megatron_moevement.runtime.progress import IterationCosts, Progress
from megatron_moevement.runtime.slots.journal import JournalState
from megatron_moevement.settings.faults import Place
from megatron_moevement.strategies.memory import JobMemory
from megatron_moevement.strategies.recovery import MemoryRecovery
from megatron_moevement.strategies.replay import Replay
from megatron_moevement.strategies.scalars import encode_entry
from megatron_moevement.strategies.strategy import NO_WINDOW, Recovered
from megatron_moevement.strategies.trained import Trained
from megatron_moevement.strategies.window_capture import WindowCapture


class SparseCheckpointing:
    """Protects a job by sparse checkpoints; the training thread of every rank calls it."""

    def __init__(
        self,
        trained: Trained,
        live: LiveOperators,
        memory: JobMemory,
        events: Events,
        say: Callable[[str], None],
        *,
        frozen_work: FrozenWork = FrozenWork.SKIPPED,
    ) -> None:
        """Takes over the memory; closes it at the end.

        Args:
            trained: the live objects.
            live: this rank's operators.
            memory: this process's store, and its peers.
            events: told of windows, plans and replays.
            say: tells the user a line.
            frozen_work: what a replay does for operators that it does not train.
        """
        self._trained = trained
        self._live = live
        self._memory = memory
        self._events = events
        self._say = say
        self._freezing = Freezing(trained.chunks, trained.optimizer, frozen_work)
        self._capture = memory.generation.own(lambda: Capture(trained.copy_stream()))
        self._schedule = memory.plan.schedule
        self._persisted: Window | None = None
        self._windows: WindowCapture | None = None
        self._replay: Replay | None = None
        self._era = self._epoch = 0
        self._started_s = 0.0
        self._replicated_bytes = 0

    def recover(self, durable: int) -> Recovered | None:
        """Brings back the newest persisted window, if the processes together have one."""
        self._started_s = time.perf_counter()
        recovery = MemoryRecovery(self._trained, self._memory, self._live)
        plan = recovery.make_plan(durable)
        if plan is None:
            return None
        self._emit_plan(plan)
        self._era, self._epoch = plan.era, plan.epoch
        if plan.verdict is not Verdict.GLOBAL:
            return None
        self._replay = recovery.carry_out(plan, self._freezing)
        window = self._replay.window
        self._schedule = self._replay.schedule
        self._persisted = plan.persisted
        self._windows = self._captures(window.start, window.last + 1)
        self._replay.enter(window.start)
        recovered = Recovered(self._replay.start, plan.target)
        self._end_replay_if_over()
        return recovered

    def begin(self, progress: Progress) -> None:
        """Forgets what lies in memory, and captures the state that the job starts from."""
        self._memory.open_anew()
        # A durable checkpoint that was loaded meanwhile brought tensors of its own.
        self._live = LiveOperators(self._trained.chunks, self._trained.optimizer)
        first = progress.committed
        self._schedule = self._memory.schedule_from(first, self._epoch)
        self._memory.journal.restore_losses(self._trained.ledger.losses())
        self._memory.journal.write_state(self._state(first))
        self._windows = self._captures(first, first)
        self._windows.begin(first, self._trained.scalars(progress))

    def injected_statistics(self, step: int) -> GradientStatistics | None:
        """Returns what the ledger says of a step while operators are frozen."""
        return None if self._replay is None else self._replay.statistics(step)

    def await_commit(self, step: int) -> int:
        """Waits for the copy of the former state and for room; returns what is complete here."""
        del step
        assert self._windows is not None
        window = self._windows.await_commit()
        return NO_WINDOW if window is None else window.start

    def commit(self, entry: LedgerEntry, progress: Progress, persisted_start: int) -> None:
        """Writes the journal, frees what a persisted window replaces, captures the new state."""
        assert self._windows is not None
        step = progress.committed
        agreed = None if persisted_start < 0 else self._schedule.window_of(persisted_start)
        before, self._persisted = self._persisted, newest_persisted(self._persisted, agreed)
        known = step if self._replay is None else max(step, self._replay.target)
        self._trained.faults.strike(step, Place.LEDGER)
        self._memory.journal.commit(self._state(known), step, encode_entry(entry), entry.loss)
        self._trained.faults.strike(step, Place.COMMITTED)
        if agreed is not None:
            self._windows.drop_before(agreed)
        if self._persisted is not None and self._persisted != before:
            self._events.emit(
                EventName.WINDOW_PERSISTED,
                step,
                start=self._persisted.start,
                size=self._persisted.size,
                lag=step - self._persisted.last,
            )
        if self._replay is not None:
            replayed = self._replay.replayed(entry)
            self._events.emit(
                EventName.REPLAY,
                step,
                active=replayed.active,
                frozen=replayed.frozen,
                weight_gradients=self._freezing.work.value,
                replay_verified=replayed.verified,
            )
        self._windows.captured_bytes = 0
        if step == self._windows.next_step:
            self._windows.begin(step, self._trained.scalars(progress))

    def after_step(self) -> None:
        """Brings in the next slot of a replay."""
        if self._replay is not None:
            self._trained.faults.strike(self._replay.reached + 1, Place.REPLAY)
            self._replay.enter(self._replay.reached + 1)
            self._end_replay_if_over()

    def costs(self) -> IterationCosts:
        """Returns what the last step cost."""
        assert self._windows is not None
        before, self._replicated_bytes = self._replicated_bytes, self._memory.copies.sent_bytes
        return IterationCosts(
            stall=self._windows.stall,
            captured_bytes=self._windows.captured_bytes,
            replicated_bytes=self._replicated_bytes - before,
            host_bytes=self._memory.host_bytes,
        )

    def finish(self) -> None:
        """Lets `close` remove the store."""
        self._memory.finish()

    def close(self) -> None:
        """Ends all threads and connections; the store stays unless the job has finished."""
        self._capture.close()
        self._memory.close()

    def _captures(self, oldest: int, next_step: int) -> WindowCapture:
        memory, rank = self._memory, self._trained.rank
        ring_file = memory.own_ring
        return WindowCapture(
            self._capture,
            ring_file,
            memory.copies,
            self._schedule,
            slot_layouts(self._schedule, rank, self._live),
            era=self._era,
            ring=SlotRing(ring_file.capacity, oldest=oldest, next_step=next_step),
            faults=self._trained.faults,
        )

    def _state(self, committed: int) -> JournalState:
        return JournalState(
            era=self._era,
            epoch=self._schedule.epoch,
            committed=committed,
            persisted=self._persisted,
            rank=self._trained.rank,
        )

    def _end_replay_if_over(self) -> None:
        if self._replay is not None and self._replay.is_over:
            duration = timedelta(seconds=time.perf_counter() - self._started_s)
            self._events.emit(
                EventName.RECOVERED,
                self._replay.reached,
                replayed_steps=self._replay.reached - self._replay.window.start,
                duration_s=duration.total_seconds(),
            )
            if dist.get_rank() == 0 and self._memory.generation.number:
                self._say(
                    f"generation {self._memory.generation.number}: resumed at step "
                    f"{self._replay.reached}, {duration.total_seconds():.1f} s"
                )
            self._replay = None

    def _emit_plan(self, plan: Plan) -> None:
        self._events.emit(
            EventName.PLAN,
            plan.target,
            verdict=plan.verdict.value,
            reason=plan.reason,
            target=plan.target,
            scope=sorted(plan.start_of),
            window=None if plan.window is None else plan.window.start,
            replayed_steps=plan.replayed_steps,
        )
        if dist.get_rank() == 0:
            self._say(f"{plan.verdict.value}: {plan.reason}")
