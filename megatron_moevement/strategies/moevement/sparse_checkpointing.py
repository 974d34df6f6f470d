"""Sparse checkpointing: a sparse snapshot every iteration, in the memory of r + 1 processes.

One object protects one generation. After a restart a new one is opened, in the same process with
the same `CarriedState` and store; its `recover` gathers the facts (docs/understand/recovery.md).

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
from megatron_moevement.policy.outcome.account import RecoveryAccount
from megatron_moevement.policy.recovery.newest_state import Durable
from megatron_moevement.policy.recovery.plan import Plan, RankPlan, Verdict, WindowEdges
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.capture.capture import Capture
from megatron_moevement.runtime.coordination.commit_barrier import Agreement, ReplicaRng, Vote
from megatron_moevement.runtime.coordination.ledger import LedgerEntry
from megatron_moevement.runtime.coordination.progress import IterationCosts, Progress
from megatron_moevement.runtime.observation.events import EventName, Events
from megatron_moevement.runtime.slots.journal import JournalState
from megatron_moevement.runtime.slots.slot_record import SlotRecord
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.strategies.live_objects import LiveObjects
from megatron_moevement.strategies.moevement.capture.replica_audit import ReplicaAudit
from megatron_moevement.strategies.moevement.capture.window_capture import WindowCapture
from megatron_moevement.strategies.moevement.carried_state import (
    TORN,
    Agreed,
    CarriedState,
    SurvivingState,
)
from megatron_moevement.strategies.moevement.protection.host_memory import HostMemory
from megatron_moevement.strategies.moevement.protection.protection_watch import ProtectionWatch
from megatron_moevement.strategies.moevement.recovery.boundaries import Boundaries
from megatron_moevement.strategies.moevement.recovery.executor import Execution, start_over
from megatron_moevement.strategies.moevement.recovery.planning import Planning, Start
from megatron_moevement.strategies.moevement.recovery.rejoin import Laps, Rejoin
from megatron_moevement.strategies.moevement.recovery.replay import Replay
from megatron_moevement.strategies.moevement.recovery.replay_witness import ReplayWitness
from megatron_moevement.strategies.moevement.recovery.replicas import Replicas
from megatron_moevement.strategies.scalars import encode_entry
from megatron_moevement.strategies.strategy import NOT_COVERED, Anew, Covered, Recovered, Strategy


class SparseCheckpointing(Strategy):
    """Protects a job by sparse checkpoints; the training thread of every rank calls it."""

    def __init__(
        self,
        objects: LiveObjects,
        live: LiveOperators,
        memory: HostMemory,
        events: Events,
        say: Callable[[str], None],
        *,
        carried: CarriedState,
        replicas: Replicas,
        audit: ReplicaAudit,
        protection: ProtectionWatch,
        frozen_work: FrozenWork = FrozenWork.SKIPPED,
    ) -> None:
        """Takes over the memory; closes it at the end.

        Args:
            objects: the live objects.
            live: this rank's operators.
            memory: this process's store, and its peers.
            events: told of windows, plans and replays.
            say: tells the user a line.
            carried: what this process takes over a restart.
            replicas: which ranks hold the same as this one.
            audit: compares what they capture.
            protection: is told of windows that are persisted.
            frozen_work: what a replay does for operators that it does not train.
        """
        self._objects = objects
        self._live = live
        self._memory = memory
        self._events = events
        self._say = say
        self._carried = carried
        self._replicas = replicas
        self._audit = audit
        self._protection = protection
        self._freezing = Freezing(objects.chunks, objects.optimizer, frozen_work)
        self._capture = memory.generation.own(lambda: Capture(objects.copy_stream()))
        self._boundaries = memory.generation.own(lambda: Boundaries(objects, memory))
        self._schedule = memory.plan.schedule
        self._persisted: Window | None = None
        self._complete: Window | None = None  # has all copies that this generation is to make
        self._windows: WindowCapture | None = None
        self._rejoin: Rejoin | None = None
        self._begins: Callable[[Progress], Recovered | None] | None = None
        self._witness: ReplayWitness | None = None
        self._has_left = True
        self._rollbacks = self._schedule_version = 0
        self._step = 0
        self._replicated_bytes = 0

    def recover(self, durable: Durable) -> Recovered | Anew:
        """Brings the job back to the newest step that any process of it committed."""
        laps = Laps(self._carried)
        sources = (self._objects, self._memory, self._carried, self._replicas)
        planning = Planning(*sources, events=self._events, say=self._say)
        start = planning.start(durable)
        laps.end("plan")
        plan = start.plan
        if plan is None or plan.verdict is Verdict.ROLLBACK or plan.is_from_durable:
            self._begins = lambda progress: self._begin(planning, start, laps, progress)
            start_over(self._objects, self._memory, self._carried, start.facts.durable)
            return Anew(start.is_continuing)
        return self._carry_out(Agreed(start.facts, plan), laps)

    def begin(self, progress: Progress) -> Recovered | None:
        """Replays from the state that the job starts from, or forgets what lies in memory."""
        assert self._begins is not None
        return self._begins(progress)

    def _begin(
        self, planning: Planning, start: Start, laps: Laps, progress: Progress
    ) -> Recovered | None:
        # A durable checkpoint that was loaded meanwhile brought tensors of its own.
        self._live = LiveOperators(self._objects.chunks, self._objects.optimizer)
        start = planning.loaded(start, progress.committed)
        plan = start.plan
        if plan is not None and plan.is_from_durable:
            loaded = SurvivingState.dense(self._objects.scalars(progress))
            return self._carry_out(Agreed(start.facts, plan), laps, loaded)
        self._rollbacks = planning.next_rollbacks(start)
        self._schedule_version = 0 if plan is None else plan.schedule_version
        self._restart_windows(progress)
        if plan is not None:
            rejoin = self._rejoin_for(Agreed(start.facts, plan), laps)
            self._tell(rejoin.went_back(progress.committed))
        return None

    def _carry_out(
        self, agreed: Agreed, laps: Laps, loaded: SurvivingState | None = None
    ) -> Recovered:
        """Brings this rank to where a plan wants it, in order to replay or to stand by."""
        plan = agreed.plan
        self._rollbacks, self._schedule_version = plan.rollbacks, plan.schedule_version
        given = (self._objects, self._memory, self._live, self._carried)
        execution = Execution(*given, agreed)
        replay = execution.carry_out(self._freezing, loaded)
        laps.end("fetch")
        self._schedule = execution.schedule
        self._persisted = plan.persisted
        self._drop_logs()
        self._witness = None if replay is None else replay.witness
        is_bare = replay is None and plan.edges is WindowEdges.RESTARTED
        if is_bare:
            self._restart_windows(self._carried.scalars.progress)
        else:
            self._capture_on(execution.own, replay)
        self._rejoin = self._rejoin_for(agreed, laps, replay)
        if replay is not None:
            self._replay_on(execution, replay, plan)
        progress = self._carried.scalars.progress if replay is None else replay.start
        return Recovered(progress, plan.target, is_bare=is_bare)

    def _capture_on(self, own: RankPlan, replay: Replay | None) -> None:
        """Captures what follows the slots that the ring holds."""
        ring = SlotRing(self._memory.own_ring.capacity, own.oldest, own.next_step)
        if replay is None or replay.is_dense:
            self._stand_by(own.start, ring)
        else:
            self._windows = self._captures(ring)

    def _replay_on(self, execution: Execution, replay: Replay, plan: Plan) -> None:
        """Begins a replay."""
        begin = replay.start.committed
        if plan.is_apart:
            self._boundaries.replay(execution.boundaries(), begin + 1)
        else:
            self._boundaries.train()
        replay.enter(begin)
        self._note_dense(replay)

    def _rejoin_for(self, agreed: Agreed, laps: Laps, replay: Replay | None = None) -> Rejoin:
        own = (self._objects, self._memory, self._events, self._carried)
        return Rejoin(*own, agreed=agreed, laps=laps, replay=replay)

    def _restart_windows(self, progress: Progress) -> None:
        """Forgets what lies in memory, and captures the live state as the first one."""
        first = progress.committed
        self._schedule = self._memory.plan.schedule_from(first, self._schedule_version)
        self._persisted = None
        self._memory.restart_windows(self._state(first), self._objects.ledger.losses())
        if self._memory.log is not None:
            self._memory.log.clear()
        self._carried.live = SurvivingState.dense(self._objects.scalars(progress))
        self._stand_by(first, SlotRing(self._memory.own_ring.capacity, first, first))

    def replayed_gradient_stats(self, step: int) -> GradientStatistics | None:
        """Returns what the ledger says of a step while this rank replays and needs it."""
        return None if self._replay is None else self._replay.statistics(step)

    def await_commit(self, step: int) -> Covered:
        """Waits for the copies of the former state and of the log, and for room.

        Returns:
            The newest window that is complete here, if any.
        """
        window = self._captured.await_commit()
        self._captured.stall += self._boundaries.await_landed()
        if self._is_dense:
            self._carried.live = self._carried.live.with_finished(step, random_state())
        if window is None:
            return NOT_COVERED
        copies = self._memory.copies.acknowledgements.fewest_copies(self._persisted)
        return Covered(window.start, copies)

    def replica_rng(self) -> ReplicaRng | None:
        """Returns the random streams behind the passes of a step, where there are replicas."""
        return self._replicas.replica_rng()

    def agree_within_stage(self, vote: Vote) -> Agreement | None:
        """Agrees within the stage where the other stages stand by."""
        return None if self._rejoin is None else self._rejoin.agree_within_stage(vote)

    def enter_commit(self) -> None:
        """Notes that the state is torn; while a replay converts a window it is given up already."""
        if self._is_dense:
            self._carried.live = TORN

    def commit(self, entry: LedgerEntry, progress: Progress, covered: Covered) -> None:
        """Writes the journal, frees what a persisted window replaces, captures the new state."""
        self._step = step = progress.committed
        agreed = None if covered.start < 0 else self._schedule.window_of(covered.start)
        before, self._persisted = self._persisted, newest_persisted(self._persisted, agreed)
        known = step if self._replay is None else max(step, self._replay.target)
        self._objects.faults.strike(step, FaultPoint.LEDGER)
        self._memory.commit(self._state(known), step, encode_entry(entry), entry.loss)
        self._objects.faults.strike(step, FaultPoint.COMMITTED)
        if agreed is not None:
            self._complete = agreed
            self._captured.drop_before(agreed)
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
        self._captured.captured_bytes = self._captured.metadata_bytes = 0
        if self._replay is not None:
            self._replay.committed(entry, progress)
        if step == self._captured.next_step:
            scalars = self._objects.scalars(progress)
            self._captured.begin(step, scalars)
            if self._replay is not None:
                self._capture.await_landed()  # a state that differs is never published
            if self._is_dense:
                self._carried.live = SurvivingState.dense(scalars)

    def after_step(self) -> None:
        """Brings in the next slot of a replay; in training forgets, and compares replicas."""
        self._forget_left()
        rejoin = self._rejoin
        if rejoin is None:
            self._audit.after_step(self._step, self._schedule, self._memory.own_ring)
        elif rejoin.replay is not None:
            replay = rejoin.replay
            rejoin.verify(replay, self._freezing, self._boundaries)
            self._objects.faults.strike(replay.reached + 1, FaultPoint.REPLAY)
            replay.enter(replay.reached + 1)
            self._note_dense(replay)
            self._boundaries.advance(replay.reached + 1)

    def rejoin(self) -> None:
        """Waits for all ranks, and until this rank's slots have their copies again."""
        if self._rejoin is not None:
            self._capture.await_landed()  # the witness has compared the newest slot, too
            self._tell(self._rejoin.rejoin())
            self._rejoin = self._witness = None
            self._boundaries.train()

    def _tell(self, account: RecoveryAccount) -> None:
        if dist.get_rank() == 0:
            self._say(account.line)

    def costs(self) -> IterationCosts:
        """Returns what the last step cost."""
        before, self._replicated_bytes = self._replicated_bytes, self._memory.copies.sent_bytes
        return IterationCosts(
            stall=self._captured.stall,
            captured_bytes=self._captured.captured_bytes,
            metadata_bytes=self._captured.metadata_bytes,
            replicated_bytes=self._replicated_bytes - before,
            log_bytes=self._boundaries.logged_bytes(self._step),
            host_bytes=self._memory.host_bytes,
        )

    def finish(self) -> None:
        """Lets `close` remove the store."""
        if self._windows is not None and self._rejoin is None:
            self._carried.store.forget_flushed()
        self._memory.finish()

    def close(self) -> None:
        """Ends all threads and connections; the store stays unless the job has finished."""
        self._freezing.close()
        self._boundaries.close()
        self._capture.close()
        self._memory.close()

    @property
    def _captured(self) -> WindowCapture:
        """What is captured, from `begin` or `recover` on."""
        assert self._windows is not None
        return self._windows

    @property
    def _replay(self) -> Replay | None:
        return None if self._rejoin is None else self._rejoin.replay

    @property
    def _is_dense(self) -> bool:
        """Whether a fault in a later step leaves a state that is worth something."""
        return self._replay is None or self._is_worth(self._replay)

    @staticmethod
    def _is_worth(replay: Replay) -> bool:
        """Returns whether a later recovery may go on from what a replay has reached."""
        return replay.is_dense and not replay.witness.has_differed

    def _note_dense(self, replay: Replay) -> None:
        """Lets a later recovery go on from here, once a replay has converted its window."""
        state = self._carried.live.state
        is_noted = (state.condition, state.step) == (Condition.DENSE, replay.reached)
        if self._is_worth(replay) and not is_noted:
            self._carried.live = SurvivingState.dense(self._objects.scalars(replay.progress))

    def _stand_by(self, step: int, ring: SlotRing) -> None:
        """Captures from the state of a step on, which is the live one."""
        self._windows = self._captures(ring)
        self._boundaries.train()
        if ring.next_step == step:
            self._windows.begin(step, self._carried.scalars)

    def _forget_left(self) -> None:
        """Removes what nobody is to keep, once nothing of it can be needed any more."""
        is_returning = self._rejoin is not None
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
            slot_layouts(self._schedule, self._objects.rank, self._live),
            rollbacks=self._rollbacks,
            ring=ring,
            faults=self._objects.faults,
            state_digest=self._live.digest,
            admits=self._admits,
        )

    def _admits(self, record: SlotRecord) -> bool:
        """Returns whether a slot may be kept; on the capture's thread."""
        witness = self._witness
        return witness is None or witness.admits(record)

    def _state(self, committed: int) -> JournalState:
        return JournalState(
            rollbacks=self._rollbacks,
            schedule_version=self._schedule.schedule_version,
            committed=committed,
            persisted=self._persisted,
            rank=self._objects.rank,
        )
