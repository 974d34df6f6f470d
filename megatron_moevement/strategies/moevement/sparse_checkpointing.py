"""Sparse checkpointing: a sparse snapshot every iteration, in the memory of r + 1 processes.

One object protects one generation. After a restart a new one is opened, in the same process with
the same `Kept` and store, and its `recover` finds out what everybody holds (docs/recovery.md).

Source: sections 3.2 and 3.3 of the paper. What is decided is in `policy/`; this carries it out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from megatron_moevement.integrations.megatron.freezing import Freezing, FrozenWork
from megatron_moevement.integrations.megatron.optimizer import GradientStatistics
from megatron_moevement.integrations.megatron.random_state import random_state
from megatron_moevement.integrations.megatron.slot_layout import slot_layouts
from megatron_moevement.integrations.megatron.snapshots import LiveOperators
from megatron_moevement.policy.copies.commit import newest_persisted
from megatron_moevement.policy.copies.left_stores import may_forget_left
from megatron_moevement.policy.copies.retention import retain
from megatron_moevement.policy.copies.slot_ring import SlotRing
from megatron_moevement.policy.facts.facts import Condition
from megatron_moevement.policy.recovery.newest_state import Durable
from megatron_moevement.policy.recovery.plan import Plan, Verdict, WindowEdges
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.capture.capture import Capture
from megatron_moevement.runtime.coordination.commit_barrier import Agreement, ReplicaStreams, Vote
from megatron_moevement.runtime.coordination.ledger import LedgerEntry
from megatron_moevement.runtime.coordination.progress import IterationCosts, Progress
from megatron_moevement.runtime.observation.events import EventName, Events
from megatron_moevement.runtime.slots.journal import JournalState
from megatron_moevement.runtime.slots.slot_record import SlotRecord
from megatron_moevement.settings.faults import Place
from megatron_moevement.strategies.moevement.capture.replica_audit import ReplicaAudit
from megatron_moevement.strategies.moevement.capture.window_capture import WindowCapture
from megatron_moevement.strategies.moevement.kept import TORN, Kept, Live
from megatron_moevement.strategies.moevement.protection.host_memory import JobMemory
from megatron_moevement.strategies.moevement.protection.protection_watch import ProtectionWatch
from megatron_moevement.strategies.moevement.recovery.boundaries import Boundaries
from megatron_moevement.strategies.moevement.recovery.executor import MemoryRecovery
from megatron_moevement.strategies.moevement.recovery.rejoin import Returning
from megatron_moevement.strategies.moevement.recovery.replay import Replay
from megatron_moevement.strategies.moevement.recovery.replay_witness import ReplayWitness
from megatron_moevement.strategies.moevement.recovery.replicas import Replicas
from megatron_moevement.strategies.moevement.recovery.start import Start
from megatron_moevement.strategies.scalars import encode_entry
from megatron_moevement.strategies.strategy import (
    NOT_COVERED,
    Anew,
    Covered,
    Recovered,
    Strategy,
)
from megatron_moevement.strategies.trained import Trained


class SparseCheckpointing(Strategy):
    """Protects a job by sparse checkpoints; the training thread of every rank calls it."""

    def __init__(
        self,
        trained: Trained,
        live: LiveOperators,
        memory: JobMemory,
        events: Events,
        say: Callable[[str], None],
        *,
        kept: Kept,
        replicas: Replicas,
        audit: ReplicaAudit,
        protection: ProtectionWatch,
        frozen_work: FrozenWork = FrozenWork.SKIPPED,
    ) -> None:
        """Takes over the memory; closes it at the end.

        Args:
            trained: the live objects.
            live: this rank's operators.
            memory: this process's store, and its peers.
            events: told of windows, plans and replays.
            say: tells the user a line.
            kept: what this process takes over a restart.
            replicas: which ranks hold the same as this one.
            audit: compares what they capture.
            protection: is told of windows that are persisted.
            frozen_work: what a replay does for operators that it does not train.
        """
        self._trained = trained
        self._live = live
        self._memory = memory
        self._events = events
        self._say = say
        self._kept = kept
        self._replicas = replicas
        self._audit = audit
        self._protection = protection
        self._freezing = Freezing(trained.chunks, trained.optimizer, frozen_work)
        self._capture = memory.generation.own(lambda: Capture(trained.copy_stream()))
        self._boundaries = memory.generation.own(lambda: Boundaries(trained, memory))
        self._schedule = memory.plan.schedule
        self._persisted: Window | None = None
        self._complete: Window | None = None  # has all copies that this generation is to make
        self._windows: WindowCapture | None = None
        self._returning: Returning | None = None
        self._start: Start | None = None
        self._witness: ReplayWitness | None = None
        self._has_left = True
        self._era = self._epoch = 0
        self._step = 0
        self._replicated_bytes = 0

    def recover(self, durable: Durable) -> Recovered | Anew:
        """Brings the job back to the newest step that any process of it committed."""
        returning = Returning(self._trained, self._memory, self._events, self._kept)
        own = (self._trained, self._memory, self._live, self._kept, self._replicas)
        recovery = MemoryRecovery(*own, events=self._events, say=self._say)
        plan = recovery.make_plan(durable)
        returning.planned()
        start = Start(recovery, returning, plan)
        if plan is None or plan.verdict is Verdict.ROLLBACK or plan.is_from_durable:
            self._start = start
            recovery.start_over()
            return Anew(recovery.is_continuing)
        return self._carry_out(start, plan)

    def begin(self, progress: Progress) -> Recovered | None:
        """Replays from the state that the job starts from, or forgets what lies in memory."""
        assert self._start is not None
        start, self._start = self._start, None
        # A durable checkpoint that was loaded meanwhile brought tensors of its own.
        self._live = LiveOperators(self._trained.chunks, self._trained.optimizer)
        plan = start.recovery.plan_from(progress.committed, start.plan)
        if plan is not None and plan.is_from_durable:
            start.recovery.go_on_from(progress, self._live)
            return self._carry_out(start, plan)
        self._era = start.recovery.next_era()
        self._epoch = 0 if plan is None else plan.epoch
        self._begin_anew(progress)
        if plan is not None:
            account = start.returning.went_back(plan, progress.committed)
            if dist.get_rank() == 0:
                self._say(account.line)
        return None

    def _carry_out(self, start: Start, plan: Plan) -> Recovered:
        """Brings this rank to where a plan wants it, in order to replay or to stand by."""
        recovery, returning = start.recovery, start.returning
        self._era, self._epoch = plan.era, plan.epoch
        replay = recovery.carry_out(plan, self._freezing)
        returning.fetched()
        self._schedule = recovery.schedule(plan)
        self._persisted = plan.persisted
        self._drop_logs()
        self._witness = None if replay is None else replay.witness
        slots = recovery.own_slots(plan)
        if replay is None and plan.edges is WindowEdges.ANEW:
            self._begin_anew(self._progress())
            returning.share(slots, [], plan.target)
        elif replay is None:
            self._stand_by(plan.target, slots.ring(plan.target))
            returning.share(slots, slots.shareable(), plan.target)
        else:
            self._prepare(replay, plan, start)
        returning.replays(replay, plan)
        if replay is not None:
            begin = replay.start.committed
            if plan.is_apart:
                self._boundaries.replay(recovery.boundaries(plan), begin + 1)
            else:
                self._boundaries.train()
            replay.enter(begin)
            self._note_dense(replay, replay.start)
        self._returning = returning
        progress = self._progress() if replay is None else replay.start
        is_bare = replay is None and plan.edges is WindowEdges.ANEW
        return Recovered(progress, plan.target, is_bare=is_bare)

    def _prepare(self, replay: Replay, plan: Plan, start: Start) -> None:
        """Gets ready to capture what a replay passes."""
        slots, begin = start.recovery.own_slots(plan), replay.start.committed
        if replay.is_dense:
            self._stand_by(begin, slots.ring(begin))
            start.returning.share(slots, slots.shareable(), begin)
        else:
            window = replay.window
            ring = SlotRing(self._memory.own_ring.capacity, window.start, window.last + 1)
            self._windows = self._captures(ring)
            start.returning.share(slots, [window], window.last)

    def _begin_anew(self, progress: Progress) -> None:
        """Forgets what lies in memory, and captures the live state as the first one."""
        first = progress.committed
        self._schedule = self._memory.schedule_from(first, self._epoch)
        self._persisted = None
        self._memory.begin_anew(self._state(first), self._trained.ledger.losses())
        if self._memory.log is not None:
            self._memory.log.clear()
        self._kept.live = Live.dense(self._trained.scalars(progress))
        self._stand_by(first, SlotRing(self._memory.own_ring.capacity, first, first))

    def injected_statistics(self, step: int) -> GradientStatistics | None:
        """Returns what the ledger says of a step while this rank replays and needs it."""
        return None if self._replay is None else self._replay.statistics(step)

    def await_commit(self, step: int) -> Covered:
        """Waits for the copies of the former state and of the log, and for room.

        Returns:
            The newest window that is complete here, if any.
        """
        assert self._windows is not None
        window = self._windows.await_commit()
        self._windows.stall += self._boundaries.await_landed()
        if self._is_dense:
            self._kept.live = self._kept.live.with_finished(step, random_state())
        if window is None:
            return NOT_COVERED
        copies = self._memory.copies.acknowledgements.fewest_copies(self._persisted)
        return Covered(window.start, copies)

    def streams(self) -> ReplicaStreams | None:
        """Returns the random streams behind the passes of a step, where there are replicas."""
        return self._replicas.streams()

    def agree_alone(self, vote: Vote) -> Agreement | None:
        """Agrees within the stage where the other stages stand by."""
        return None if self._returning is None else self._returning.agree_alone(vote)

    def enter_commit(self) -> None:
        """Notes that the state is torn; while a replay converts a window it is given up already."""
        if self._is_dense:
            self._kept.live = TORN

    def commit(self, entry: LedgerEntry, progress: Progress, covered: Covered) -> None:
        """Writes the journal, frees what a persisted window replaces, captures the new state."""
        assert self._windows is not None
        self._step = step = progress.committed
        agreed = None if covered.start < 0 else self._schedule.window_of(covered.start)
        before, self._persisted = self._persisted, newest_persisted(self._persisted, agreed)
        known = step if self._replay is None else max(step, self._replay.target)
        self._trained.faults.strike(step, Place.LEDGER)
        self._memory.commit(self._state(known), step, encode_entry(entry), entry.loss)
        self._trained.faults.strike(step, Place.COMMITTED)
        if agreed is not None:
            self._complete = agreed
            self._windows.drop_before(agreed)
        if self._persisted is not None and self._persisted != before:
            self._drop_logs()
            self._events.emit(
                EventName.WINDOW_PERSISTED,
                step,
                start=self._persisted.start,
                size=self._persisted.size,
                lag=step - self._persisted.last,
                copies=covered.copies,
            )
            folder = self._memory.store.folder
            self._protection.at_edge(step, self._persisted, covered.copies, folder)
        self._windows.captured_bytes = self._windows.metadata_bytes = 0
        if self._returning is not None:
            self._returning.committed(entry, progress)
        if step == self._windows.next_step:
            scalars = self._trained.scalars(progress)
            self._windows.begin(step, scalars)
            if self._replay is not None:
                self._capture.await_landed()  # a state that differs is never published
            if self._is_dense:
                self._kept.live = Live.dense(scalars)

    def after_step(self) -> None:
        """Brings in the next slot of a replay; in training forgets, and compares replicas."""
        self._forget_left()
        if self._returning is None:
            self._audit.after_step(self._step, self._schedule, self._memory.own_ring)
        if self._returning is not None and self._replay is not None:
            self._returning.verify(self._freezing, self._boundaries)
            self._trained.faults.strike(self._replay.reached + 1, Place.REPLAY)
            self._replay.enter(self._replay.reached + 1)
            self._note_dense(self._replay, self._returning.progress)
            self._boundaries.advance(self._replay.reached + 1)

    def rejoin(self) -> None:
        """Waits for all ranks, and until this rank's slots have their copies again."""
        if self._returning is not None:
            self._capture.await_landed()  # the witness has compared the newest slot, too
            account = self._returning.rejoin()
            if dist.get_rank() == 0:
                self._say(account.line)
            self._returning = self._witness = None
            self._boundaries.train()

    def costs(self) -> IterationCosts:
        """Returns what the last step cost."""
        assert self._windows is not None
        before, self._replicated_bytes = self._replicated_bytes, self._memory.copies.sent_bytes
        return IterationCosts(
            stall=self._windows.stall,
            captured_bytes=self._windows.captured_bytes,
            metadata_bytes=self._windows.metadata_bytes,
            replicated_bytes=self._replicated_bytes - before,
            log_bytes=self._boundaries.logged_bytes(self._step),
            host_bytes=self._memory.host_bytes,
        )

    def finish(self) -> None:
        """Lets `close` remove the store."""
        if self._windows is not None and self._returning is None:
            self._kept.store.forget_flushed()
        self._memory.finish()

    def close(self) -> None:
        """Ends all threads and connections; the store stays unless the job has finished."""
        self._freezing.close()
        self._boundaries.close()
        self._capture.close()
        self._memory.close()

    @property
    def _replay(self) -> Replay | None:
        return None if self._returning is None else self._returning.replay

    @property
    def _is_dense(self) -> bool:
        """Whether a fault in a later step leaves a state that is worth something."""
        return self._replay is None or self._is_worth(self._replay)

    @staticmethod
    def _is_worth(replay: Replay) -> bool:
        """Returns whether a later recovery may go on from what a replay has reached."""
        return replay.is_dense and not replay.witness.has_differed

    def _note_dense(self, replay: Replay, progress: Progress) -> None:
        """Lets a later recovery go on from here, once a replay has converted its window."""
        state = self._kept.live.state
        is_noted = (state.condition, state.step) == (Condition.DENSE, replay.reached)
        if self._is_worth(replay) and not is_noted:
            self._kept.live = Live.dense(self._trained.scalars(progress))

    def _progress(self) -> Progress:
        assert self._kept.live.scalars is not None
        return self._kept.live.scalars.progress

    def _stand_by(self, step: int, ring: SlotRing) -> None:
        """Captures from the state of a step on, which is the live one."""
        assert self._kept.live.scalars is not None
        self._windows = self._captures(ring)
        self._boundaries.train()
        if ring.next_step == step:
            self._windows.begin(step, self._kept.live.scalars)

    def _forget_left(self) -> None:
        """Removes what nobody is to keep, once nothing of it can be needed any more."""
        is_returning = self._returning is not None
        if self._has_left and may_forget_left(self._complete, is_returning=is_returning):
            self._memory.forget_left()
            self._has_left = False

    def _drop_logs(self) -> None:
        if self._memory.log is not None and self._persisted is not None:
            self._memory.log.drop_before(retain(self._persisted, 0).oldest_log_step)

    def _captures(self, ring: SlotRing) -> WindowCapture:
        memory = self._memory
        return WindowCapture(
            self._capture,
            memory.own_ring,
            memory.copies,
            self._schedule,
            slot_layouts(self._schedule, self._trained.rank, self._live),
            era=self._era,
            ring=ring,
            faults=self._trained.faults,
            state_digest=self._live.digest,
            admits=self._admits,
        )

    def _admits(self, record: SlotRecord) -> bool:
        """Returns whether a slot may be kept; on the capture's thread."""
        witness = self._witness
        return witness is None or witness.admits(record)

    def _state(self, committed: int) -> JournalState:
        return JournalState(
            era=self._era,
            epoch=self._schedule.epoch,
            committed=committed,
            persisted=self._persisted,
            rank=self._trained.rank,
        )
