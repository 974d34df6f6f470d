"""Returning: from a plan to the moment at which all ranks train together again."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Sequence

from megatron_moevement.integrations.megatron.freezing import Freezing
from megatron_moevement.policy.guarantee import Level, unverified
from megatron_moevement.policy.plan import Plan
from megatron_moevement.policy.recovery_account import RankAccount, RecoveryAccount
from megatron_moevement.policy.schedule import Window
from megatron_moevement.runtime.agreement import all_gather_json
from megatron_moevement.runtime.commit_barrier import Agreement, CommitBarrier, StopRequest, Vote
from megatron_moevement.runtime.events import EventName, Events
from megatron_moevement.runtime.ledger import LedgerEntry
from megatron_moevement.runtime.meeting import Meeting
from megatron_moevement.runtime.progress import Progress
from megatron_moevement.strategies.boundaries import Boundaries
from megatron_moevement.strategies.kept import Kept, Live
from megatron_moevement.strategies.memory import JobMemory
from megatron_moevement.strategies.own_slots import OwnSlots
from megatron_moevement.strategies.replay import Replay
from megatron_moevement.strategies.strategy import NO_WINDOW
from megatron_moevement.strategies.trained import Trained


class Returning:
    """One recovery of this rank; its training thread calls it."""

    def __init__(self, trained: Trained, memory: JobMemory, events: Events, kept: Kept) -> None:
        """Starts the clock."""
        self._trained = trained
        self._memory = memory
        self._events = events
        self._kept = kept
        self._durations_s = dict(kept.downtime_s)
        if kept.joined_s is not None:
            self._durations_s["build"] = time.time() - kept.joined_s
        self._since_s = time.perf_counter()
        self._passes = dataclasses.replace(trained.schedule.passes)
        self._shared: Window | None = None
        self._plan: Plan | None = None
        self._entry: LedgerEntry | None = None
        self._progress: Progress | None = None
        self._verified = True
        self._meeting: Meeting | None = None
        self._barrier = CommitBarrier(trained.device, trained.groups.tp_dp_cp)
        self.replay: Replay | None = None
        """What this rank replays; None while it stands by."""

    def planned(self) -> None:
        """Notes that the plan is made."""
        self._lap("plan")

    def fetched(self) -> None:
        """Notes that this rank has what it goes on from."""
        self._lap("fetch")

    def share(self, slots: OwnSlots, windows: Sequence[Window], last: int) -> None:
        """Begins to send what holders lack; `rejoin` waits for the first of these windows.

        Args:
            slots: this rank's.
            windows: which of them.
            last: the newest step whose slot is not captured again.
        """
        slots.share(windows, last)
        self._shared = windows[0] if windows and slots.is_whole(windows[0]) else None

    def replays(self, replay: Replay | None, plan: Plan) -> None:
        """Learns what this rank replays, and what the job does."""
        assert self._memory.session is not None
        self.replay = replay
        self._plan = plan
        name = hashlib.sha256(self._memory.session.token).hexdigest()
        self._meeting = Meeting(f"moevement/rejoin/{name}", self._trained.patience)

    def agree_alone(self, vote: Vote) -> Agreement | None:
        """Agrees on a replayed step within the stage, where other stages stand by.

        A stage that has not computed the loss takes it from the ledger.
        """
        if self.replay is None or not self.replay.is_alone:
            return None
        if vote.loss is None:
            entry = self.replay.agreed(vote.step)
            vote = dataclasses.replace(vote, loss=entry.loss, num_tokens=entry.num_tokens)
        agreed = self._barrier.wait(dataclasses.replace(vote, streams=None))
        return dataclasses.replace(
            agreed,
            stop=StopRequest.NONE,
            window_start=NO_WINDOW,
            streams_alike=self.replay.agreed(vote.step).streams_alike,
        )

    def committed(self, entry: LedgerEntry, progress: Progress) -> None:
        """Learns that a step was replayed."""
        self._entry, self._progress = entry, progress

    @property
    def progress(self) -> Progress:
        """Behind the newest step that was replayed."""
        assert self._progress is not None
        return self._progress

    def verify(self, freezing: Freezing, boundaries: Boundaries) -> None:
        """Compares the replayed step with what it was the first time, and tells of it."""
        entry = self._entry
        assert self.replay is not None
        assert entry is not None
        step = self.replay.replayed(entry)
        sent = boundaries.verify(entry.step)
        verified = step.verified and (sent is None or sent.verified)
        self._verified = self._verified and verified
        if self._meeting is not None:
            self._meeting.note_progress()
        self._events.emit(
            EventName.REPLAY,
            entry.step,
            active=step.active,
            frozen=step.frozen,
            weight_gradients=freezing.work.value,
            replay_verified=verified,
            boundaries_equal=0 if sent is None else sent.equal,
            boundaries_unequal=0 if sent is None else len(sent.unequal),
            boundaries_unknown=0 if sent is None else len(sent.unknown),
        )

    def rejoin(self) -> RecoveryAccount:
        """Waits for all ranks, and for a copy of each slot of the window that is replayed from.

        Further copies are made while training goes on.

        Returns:
            What all ranks tell of the recovery, the restart before it included.
        """
        replay, plan = self.replay, self._plan
        assert plan is not None
        if replay is not None:
            assert replay.is_over
            self._trained.optimizer.adam_step()  # all operators count the same steps again
            self._kept.live = Live.dense(self._trained.scalars(self._progress or replay.start))
        self._lap("replay")
        if self._shared is not None:
            self._memory.copies.await_second_holder(self._shared)
        self._lap("reprotect")
        assert self._meeting is not None
        self._meeting.wait()
        self._memory.forget_others()
        self._lap("wait")
        self._kept.downtime_s, self._kept.joined_s = {}, None
        own = RankAccount(
            0 if replay is None else replay.reached - replay.start.committed,
            None if replay is None else self._verified,
            self._durations_s,
            self._memory.copies.acknowledgements.owed_copies(),
        )
        account = self._account(plan, own)
        passes = self._trained.schedule.passes.since(self._passes)
        self._events.emit(
            EventName.RECOVERED,
            plan.target,
            verdict=account.verdict,
            scope=account.scope,
            guarantee=account.level,
            replayed_steps=own.replayed_steps,
            replay_verified=own.verified,
            forward_passes=passes.forward,
            backward_passes=passes.backward,
            duration_s=sum(self._durations_s.values()),
            breakdown_s=self._durations_s,
            owed_copies=own.owed_copies,
        )
        return account

    def _account(self, plan: Plan, own: RankAccount) -> RecoveryAccount:
        """Puts together what the ranks tell; a replay that went wrong costs the guarantee."""
        told = all_gather_json(dataclasses.asdict(own), self._trained.device)
        account = RecoveryAccount(
            generation=self._memory.generation.number,
            verdict=plan.verdict,
            scope=tuple(sorted(plan.start_of)),
            target=plan.target,
            level=Level.EXACT,
            ranks=[RankAccount(**one) for one in told],
        )
        guarantee = self._kept.guarantee
        assert guarantee is not None
        if not account.verified:
            self._kept.guarantee = guarantee = unverified(guarantee, plan.target)
        return dataclasses.replace(account, level=guarantee.level)

    def _lap(self, part: str) -> None:
        now_s = time.perf_counter()
        self._durations_s[part] = now_s - self._since_s
        self._since_s = now_s
