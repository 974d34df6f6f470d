# SPDX-License-Identifier: Apache-2.0
"""Sparse checkpointing: a sparse snapshot every iteration, in the memory of r + 1 processes.

One object protects one generation. After a restart a new one is opened, in the same process with
the same `CarriedState` and store; its `recover` gathers the facts (docs/understand/recovery.md).

Source: sections 3.2 and 3.3 of the paper. What is decided is in `policy/`; this carries it out.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from megatron_moevement.integrations.megatron.freezing import Freezing, FrozenWork
from megatron_moevement.integrations.megatron.optimizer import GradientStatistics
from megatron_moevement.integrations.megatron.random_state import random_state
from megatron_moevement.policy.copies.left_stores import may_forget_left
from megatron_moevement.policy.copies.retention import LAG, retain
from megatron_moevement.policy.copies.slot_ring import SlotRing
from megatron_moevement.policy.facts.facts import Facts
from megatron_moevement.policy.recovery.lifecycle import Event
from megatron_moevement.policy.recovery.newest_state import Durable
from megatron_moevement.policy.recovery.plan import Plan, RankPlan, Verdict, WindowEdges
from megatron_moevement.policy.watching.measurements import NOT_MEASURED
from megatron_moevement.policy.window.popularity import Popularity
from megatron_moevement.runtime.capture.capture import Capture
from megatron_moevement.runtime.coordination.commit_barrier import Agreement, ReplicaRng, Vote
from megatron_moevement.runtime.coordination.ledger import LedgerEntry
from megatron_moevement.runtime.coordination.progress import IterationCosts, Progress
from megatron_moevement.runtime.observation.events import EventName
from megatron_moevement.runtime.slots.ring_file import RingFile, SlotRecord
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.strategies.moevement.capture.replica_audit import ReplicaAudit
from megatron_moevement.strategies.moevement.capture.window_capture import WindowCapture
from megatron_moevement.strategies.moevement.carried_state import (
    GIVEN_UP,
    TORN,
    Agreed,
    SurvivingState,
)
from megatron_moevement.strategies.moevement.protection.protection_watch import ProtectionWatch
from megatron_moevement.strategies.moevement.recovery.boundaries import Boundaries
from megatron_moevement.strategies.moevement.recovery.executor import Execution, start_over
from megatron_moevement.strategies.moevement.recovery.planning import Planning
from megatron_moevement.strategies.moevement.recovery.rejoin import Laps, Rejoin
from megatron_moevement.strategies.moevement.recovery.replay import Replay
from megatron_moevement.strategies.moevement.recovery.replicas import Replicas
from megatron_moevement.strategies.moevement.session import RankSession
from megatron_moevement.strategies.moevement.window_history import WindowHistory
from megatron_moevement.strategies.scalars import encode_entry
from megatron_moevement.strategies.strategy import (
    NOT_COVERED,
    Covered,
    Recovered,
    StartOver,
    Strategy,
)

logger = logging.getLogger(__name__)


class SparseCheckpointing(Strategy):
    """Protects a job by sparse checkpoints; the training thread of every rank calls it."""

    def __init__(
        self,
        session: RankSession,
        *,
        replicas: Replicas,
        audit: ReplicaAudit,
        protection: ProtectionWatch,
        frozen_work: FrozenWork = FrozenWork.SKIPPED,
    ) -> None:
        """Takes over the memory; closes it at the end.

        Args:
            frozen_work: what a replay does for operators that it does not train.
        """
        objects, own = session.objects, session.generation.own
        self._session = session
        self._replicas = replicas
        self._audit = audit
        self._protection = protection
        self._freezing = Freezing(objects.chunks, objects.optimizer, frozen_work)
        self._capture = own(lambda: Capture(objects.copy_stream()))
        self._boundaries = own(lambda: Boundaries(objects, session.memory))
        self._history = WindowHistory.begun(session.memory.plan.schedule, 0, rollbacks=0)
        self._windows: WindowCapture | None = None
        self._rejoin: Rejoin | None = None
        self._has_left = True
        self._replicated_bytes = 0

    @property
    def summary(self) -> str:
        """How it protects the job: the size of its windows, the copies, and what is promised."""
        plan, guarantee = self._session.memory.plan, self._session.carried.promise.guarantee
        copies = min(map(len, plan.placement.holders.values()), default=0)
        return (
            f"moevement: windows of W = {plan.schedule.window} steps, copies of each slot in "
            f"{copies} other processes, guarantee {guarantee.level.value}"
        )

    def recover(self, durable: Durable) -> Recovered | StartOver:
        """Brings the job back to the newest step that any process of it committed."""
        session, laps = self._session, Laps(self._session.carried)
        planning = Planning(session, self._replicas)
        agreed = planning.start(durable)
        plan = agreed.plan
        if plan is not None:
            session.schedules.learn(agreed.facts, plan, session.objects.device)
        laps.end("plan")
        if plan is None or plan.verdict is Verdict.ROLLBACK or plan.is_from_durable:
            start_over(session, agreed.facts.durable)
            return StartOver(
                lambda begun: self._begin(planning, agreed, laps, begun), agreed.is_continuing
            )
        return self._carry_out(agreed.facts, plan, laps)

    def _begin(
        self, planning: Planning, agreed: Agreed, laps: Laps, progress: Progress
    ) -> Recovered | None:
        """Replays from the state that the job starts from, or forgets what lies in memory."""
        self._session = session = self._session.with_loaded_tensors()
        agreed = planning.loaded(agreed, progress.committed)
        plan = agreed.plan
        if plan is not None and plan.is_from_durable:
            loaded = SurvivingState.dense(session.objects.scalars(progress))
            return self._carry_out(agreed.facts, plan, laps, loaded)
        rollbacks = planning.next_rollbacks(agreed)
        self._restart_windows(progress, rollbacks, plan)
        if plan is not None:
            Rejoin(session, agreed.facts, plan, laps).went_back(progress.committed)
        return None

    def _carry_out(
        self, facts: Facts, plan: Plan, laps: Laps, loaded: SurvivingState | None = None
    ) -> Recovered:
        """Brings this rank to where a plan wants it, in order to replay or to stand by."""
        session = self._session
        session.generation.advance(Event.AGREED)
        execution = Execution(session, facts, plan)
        replay = execution.carry_out(self._freezing, loaded)
        laps.end("fetch")
        self._history = execution.history
        execution.recall()
        self._drop_logs(plan)
        is_bare = replay is None and plan.edges is WindowEdges.RESTARTED
        if is_bare:
            progress = session.carried.scalars.progress
            self._restart_windows(progress, plan.rollbacks, plan)
        # What it sends is accounted for before anything is captured: a holder makes room for that.
        self._rejoin = Rejoin(session, facts, plan, laps, replay)
        if not is_bare:
            self._capture_on(execution.own, replay)
        if replay is None:
            return Recovered(session.carried.scalars.progress, plan.target, is_bare=is_bare)
        self._replay_on(execution, replay)
        return Recovered(replay.start, plan.target)

    def _capture_on(self, own: RankPlan, replay: Replay | None) -> None:
        """Captures what follows the slots that the ring holds."""
        self._windows = self._captures(own.oldest, own.next_step, replay)
        if replay is None or replay.is_dense:
            self._stand_by(own.start)

    def _replay_on(self, execution: Execution, replay: Replay) -> None:
        """Begins a replay."""
        if replay.is_alone:
            self._boundaries.replay(execution.boundaries(), replay.start.committed + 1)
        else:
            self._boundaries.train()
        replay.enter()
        self._publish(replay)

    def _restart_windows(self, progress: Progress, rollbacks: int, plan: Plan | None) -> None:
        """Forgets what lies in memory, and captures the live state as the first one."""
        objects, memory, first = self._session.objects, self._session.memory, progress.committed
        self._history = history = self._session.schedules.begun(plan, first, rollbacks)
        state = history.state(first, objects.rank)
        memory.restart_windows(state, objects.ledger.losses(), history.encoded)
        if memory.log is not None:
            memory.log.clear()
        self._session.carried.live = SurvivingState.dense(objects.scalars(progress))
        self._windows = self._captures(first, first, None)
        self._stand_by(first)

    def replayed_gradient_stats(self, step: int) -> GradientStatistics | None:
        """Returns what the ledger says of a step while this rank replays and needs it."""
        return None if self._replay is None else self._replay.statistics(step)

    def await_commit(self, step: int) -> Covered:
        """Waits for the copies of the former state and of the log, and for room.

        Returns:
            The newest window that is complete here, if any.
        """
        captured, is_replay = self._captured, self._rejoin is not None
        window, log_wait = captured.await_commit(), self._boundaries.await_landed()
        captured.profiler.step_ends(log_wait)
        carried = self._session.carried
        carried.live = carried.live.with_finished(step, random_state())
        vote = self._session.schedules.vote(self._history, is_replay=is_replay)
        measured = NOT_MEASURED if is_replay else captured.measured(step)
        popularity = self._popularity_at(step)
        if window is None:
            return dataclasses.replace(
                NOT_COVERED, schedule=vote, measured=measured, popularity=popularity
            )
        copies = self._session.memory.copies.acknowledgements.fewest_copies(self._history.persisted)
        return Covered(window.start, copies, vote, measured, popularity)

    def _popularity_at(self, step: int) -> Popularity | None:
        """Returns what is known of the experts; in a replay what was known the first time."""
        if self._replay is not None:
            return self._replay.agreed(step).popularity
        return self._session.schedules.popularity.at_barrier(step, self._history.timetable)

    def replica_rng(self) -> ReplicaRng | None:
        """Returns the random streams behind the passes of a step, where there are replicas."""
        return self._replicas.replica_rng()

    def agree_within_stage(self, vote: Vote) -> Agreement | None:
        """Agrees within the stage where the other stages stand by."""
        return None if self._rejoin is None else self._rejoin.agree_within_stage(vote)

    def enter_commit(self) -> None:
        """Notes that the state is torn."""
        self._session.carried.live = TORN

    def commit(self, entry: LedgerEntry, progress: Progress, covered: Covered) -> None:
        """Writes the journal, frees what a persisted window replaces, captures the new state."""
        session, before, step = self._session, self._history, progress.committed
        objects, memory, replay = session.objects, session.memory, self._replay
        agreed = None if covered.start < 0 else before.timetable.window_of(covered.start)
        self._history = history = self._adopted(before.committed(step, agreed), covered)
        session.schedules.measured(history, covered.measured)
        target = step if replay is None else max(step, replay.target)
        objects.faults.strike(step, FaultPoint.LEDGER)
        memory.commit(history.state(target, objects.rank), step, encode_entry(entry), entry.loss)
        objects.faults.strike(step, FaultPoint.COMMITTED)
        if agreed is not None:
            self._captured.drop_before(agreed)
            if memory.log is not None:  # where an older window was replayed, it is not news
                memory.log.drop_before(retain(agreed, 0).oldest_log_step)
        if history.persisted is not None and history.persisted != before.persisted:
            self._protection.at_edge(step, history.persisted, covered.copies, memory)
        if session.tiers is not None and replay is None:
            session.tiers.at_commit(memory, before.persisted)
        self._captured.captured_bytes = self._captured.metadata_bytes = 0
        session.schedules.popularity.committed(entry)
        if replay is not None:
            replay.committed(entry, progress)
        if step == self._captured.next_step:
            scalars = objects.scalars(progress)
            self._captured.begin(step, scalars)
            if replay is None:
                session.carried.live = SurvivingState.dense(scalars)
                objects.schedule.after_next_forward(self._capture.start)
            else:
                self._capture.await_landed()  # a state that differs is never published
        if replay is not None:
            self._publish(replay)

    def _adopted(self, history: WindowHistory, covered: Covered) -> WindowHistory:
        """Returns the history with the schedule that all ranks have just agreed on, if any."""
        schedules, memory, step = self._session.schedules, self._session.memory, history.step
        proposed = schedules.agreed(history, covered.schedule)
        if proposed is None:
            return history
        history = history.adopted(*proposed, step, step - memory.own_ring.capacity)
        memory.change_schedules(history.encoded, step)
        schedules.tell(history)
        return history

    def after_step(self) -> None:
        """Brings in the next slot of a replay; in training forgets, and compares replicas."""
        self._forget_left()
        rejoin, history = self._rejoin, self._history
        if rejoin is None:
            if self._captured.timetable is not history.timetable:
                rank, live = self._session.objects.rank, self._session.live
                self._captured.follow(history.contents(rank, live))
            self._session.schedules.after_step(history)
            ring = self._session.memory.own_ring
            self._audit.after_step(history.step, history.timetable, ring)
            self._session.memory.check_slots(self._damaged)
        elif rejoin.replay is not None:
            replay = rejoin.replay
            rejoin.verify(replay, self._freezing, self._boundaries)
            self._publish(replay)
            self._session.objects.faults.strike(replay.reached, FaultPoint.REPLAY)
            replay.enter()
            self._publish(replay)
            self._boundaries.advance(replay.reached + 1)

    def rejoin(self) -> None:
        """Waits for all ranks, and until this rank's slots have their copies again."""
        if self._rejoin is not None:
            self._capture.await_landed()  # the witness has compared the newest slot, too
            self._rejoin.rejoin()
            self._rejoin = None
            self._boundaries.train()

    def costs(self) -> IterationCosts:
        """Returns what the last step cost."""
        memory, before = self._session.memory, self._replicated_bytes
        self._replicated_bytes = memory.copies.sent_bytes
        return IterationCosts(
            captured_bytes=self._captured.captured_bytes,
            metadata_bytes=self._captured.metadata_bytes,
            replicated_bytes=self._replicated_bytes - before,
            log_bytes=self._boundaries.logged_bytes(self._history.step),
            host_bytes=memory.host_bytes,
            spent=self._captured.profiler.spent(memory.copies, self._boundaries.log_s),
        )

    def finish(self) -> None:
        """Lets `close` remove the store."""
        if self._windows is not None and self._rejoin is None:
            self._session.carried.store.forget_flushed()
        self._session.memory.finish()

    def close(self) -> None:
        """Ends all threads and connections; the store stays unless the job has finished."""
        self._session.objects.schedule.after_next_forward(None)
        self._freezing.close()
        self._boundaries.close()
        self._capture.close()
        self._session.memory.close()

    @property
    def _captured(self) -> WindowCapture:
        """What is captured, from `begin` or `recover` on."""
        assert self._windows is not None
        return self._windows

    @property
    def _replay(self) -> Replay | None:
        return None if self._rejoin is None else self._rejoin.replay

    def _publish(self, replay: Replay) -> None:
        """Lets a later recovery go on from what a replay has reached, unless it has differed."""
        carried = self._session.carried
        if replay.witness.has_differed:
            carried.live = GIVEN_UP
        elif carried.live.state != replay.state:
            scalars = self._session.objects.scalars(replay.progress)
            carried.live = SurvivingState(replay.state, scalars)

    def _stand_by(self, step: int) -> None:
        """Captures from the state of a step on, which is the live one."""
        self._boundaries.train()
        if self._captured.next_step == step:
            self._captured.begin(step, self._session.carried.scalars)
            self._capture.start()

    def _forget_left(self) -> None:
        """Removes what nobody is to keep, once nothing of it can be needed any more."""
        is_returning = self._rejoin is not None
        if self._has_left and may_forget_left(self._history.complete, is_returning=is_returning):
            self._session.memory.forget_left()
            self._has_left = False

    def _damaged(self, ring: RingFile, record: SlotRecord, parts: Sequence[str]) -> None:
        """Tells of a slot that has changed in memory; the background check's thread calls it."""
        self._session.events.emit(
            EventName.SLOT_DAMAGED, record.step, owner=str(ring.owner), parts=list(parts)
        )
        logger.warning(
            "%s of %s, of step %d, is damaged in this process's memory and serves no recovery: "
            "check the machine's memory",
            ", ".join(parts),
            ring.owner,
            record.step,
        )

    def _drop_logs(self, plan: Plan) -> None:
        """Drops what no replay of a plan reads: a stage that gives up its state sends all again."""
        if (log := self._session.memory.log) is None:
            return
        if plan.gives_up(self._session.objects.rank.pp):
            log.clear()
        elif plan.persisted is not None:
            log.drop_before(retain(plan.persisted, 0).oldest_log_step)

    def _captures(self, oldest: int, next_step: int, replay: Replay | None) -> WindowCapture:
        objects, live = self._session.objects, self._session.live
        windows = WindowCapture(
            self._capture,
            self._session.memory.copies,
            self._history.contents(objects.rank, live),
            SlotRing(self._session.memory.own_ring.capacity, LAG, oldest, next_step),
            faults=objects.faults,
            state_digest=live.digest,
            admits=(lambda record: True) if replay is None else replay.witness.admits,
        )
        windows.profiler.cpu_share = self._session.schedules.cpu_share()
        return windows
