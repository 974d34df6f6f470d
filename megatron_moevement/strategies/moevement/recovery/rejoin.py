# SPDX-License-Identifier: Apache-2.0
"""Rejoining: from a plan that is carried out to the moment at which all ranks train together."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import torch.distributed as dist

from megatron_moevement.integrations.megatron.freezing import Freezing
from megatron_moevement.policy.facts.facts import Facts
from megatron_moevement.policy.job.guarantee import Level, unverified
from megatron_moevement.policy.outcome.account import RankAccount, RecoveryAccount
from megatron_moevement.policy.outcome.replay_doubt import (
    Consequence,
    consequence_of,
    doubt_of,
    trusted_copies,
)
from megatron_moevement.policy.outcome.replay_proof import proof_of_all
from megatron_moevement.policy.recovery.plan import Plan
from megatron_moevement.runtime.coordination.agreement import all_gather_json
from megatron_moevement.runtime.coordination.commit_barrier import (
    Agreement,
    CommitBarrier,
    DisagreementError,
    StopRequest,
    Vote,
)
from megatron_moevement.runtime.coordination.rejoin_barrier import RejoinBarrier
from megatron_moevement.runtime.observation.events import EventName
from megatron_moevement.runtime.slots.hashed_bytes import HASHED
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.strategies.moevement.carried_state import (
    GIVEN_UP,
    NO_OUTAGE,
    CarriedState,
    SurvivingState,
)
from megatron_moevement.strategies.moevement.recovery.boundaries import Boundaries
from megatron_moevement.strategies.moevement.recovery.replay import Replay
from megatron_moevement.strategies.moevement.recovery.slot_transfers import send_slots
from megatron_moevement.strategies.moevement.session import RankSession
from megatron_moevement.strategies.strategy import (
    NO_WINDOW,
    UnprovenStateError,
    UnverifiedReplayError,
)


class Laps:
    """How long the parts of this rank's recovery take."""

    def __init__(self, carried: CarriedState) -> None:
        """Starts the clock, after the parts that lie before the strategy's."""
        self.durations_s = dict(carried.outage.durations_s)
        if carried.outage.joined_s is not None:
            self.durations_s["build"] = time.time() - carried.outage.joined_s
        self._since_s = self._stepped_s = time.perf_counter()
        self.ended_s = time.time()
        """When the newest part ended, in seconds since the epoch."""
        self._hashed_before = HASHED.total

    @property
    def hashed_bytes(self) -> int:
        """Bytes of slots and log that were compared with their checksums since then."""
        return HASHED.total - self._hashed_before

    def since_step_s(self) -> float:
        """Returns seconds since the last call, or since the newest part ended."""
        now_s, self._stepped_s = time.perf_counter(), max(self._stepped_s, self._since_s)
        took_s, self._stepped_s = now_s - self._stepped_s, now_s
        return took_s

    def end(self, part: str) -> None:
        """Notes that a part has ended."""
        now_s = time.perf_counter()
        self.durations_s[part] = now_s - self._since_s
        self._since_s = now_s
        self.ended_s = time.time()


class Rejoin:
    """This rank from a plan that is carried out on; its training thread calls it."""

    def __init__(
        self,
        session: RankSession,
        facts: Facts,
        plan: Plan,
        laps: Laps,
        replay: Replay | None = None,
    ) -> None:
        """Begins to send what holders lack; `rejoin` waits for copies of the guarded window.

        Args:
            session: of this rank; its memory is open.
            facts: that the plan was made from.
            replay: of this rank; None for a bystander.
        """
        self._session = session
        self._objects = objects = session.objects
        self._memory = memory = session.memory
        self._carried = session.carried
        self._facts = facts
        self._plan = plan
        self._laps = laps
        self.replay = replay
        """What this rank replays; None while it stands by."""
        self._passes = dataclasses.replace(objects.schedule.passes)
        self._rejoin_barrier = RejoinBarrier(
            f"moevement/rejoin/{memory.rejoin_barrier}", objects.patience
        )
        self._barrier = CommitBarrier(objects.device, objects.groups.tp_dp_cp)
        own = plan.for_rank(objects.rank)
        self._guarded = own.guarded
        send_slots(memory, own.sends)

    def agree_within_stage(self, vote: Vote) -> Agreement | None:
        """Agrees on a replayed step within the stage, where other stages stand by.

        A stage that has not computed the loss takes it from the ledger.
        """
        if self.replay is None or not self.replay.is_alone:
            return None
        if vote.loss is None:
            entry = self.replay.agreed(vote.step)
            vote = dataclasses.replace(vote, loss=entry.loss, num_tokens=entry.num_tokens)
        agreed = self._barrier.wait(dataclasses.replace(vote, replica_rng=None))
        return dataclasses.replace(
            agreed,
            stop=StopRequest.NONE,
            window_start=NO_WINDOW,
            rng_equal=self.replay.agreed(vote.step).rng_equal,
        )

    def verify(self, replay: Replay, freezing: Freezing, boundaries: Boundaries) -> None:
        """Compares the newest replayed step with what it was the first time, and tells of it."""
        sent = boundaries.verify(replay.reached)
        replay.witness.note_step(sent, scalars_equal=replay.is_verified)
        verified = replay.is_verified and (sent is None or sent.verified)
        frozen = len(freezing.frozen)
        self._rejoin_barrier.note_progress()
        duration_s = self._laps.since_step_s()
        self._session.events.emit(
            EventName.REPLAY,
            replay.reached,
            duration_s=duration_s,
            active=len(self._session.live.operators) - frozen,
            frozen=frozen,
            weight_gradients=freezing.work.value,
            replay_verified=verified,
            boundaries_equal=0 if sent is None else sent.equal,
            boundaries_unequal=0 if sent is None else len(sent.unequal),
            boundaries_unknown=0 if sent is None else len(sent.unknown),
        )

    def rejoin(self) -> None:
        """Waits for all ranks, and for a copy of each slot of the window that is replayed from.

        Further copies are made while training goes on.

        Raises:
            UnverifiedReplayError: on all ranks: a replay differed from the first time, though the
                job promised the same bits.
        """
        replay, plan = self.replay, self._plan
        if replay is not None:
            if not replay.is_over:
                raise DisagreementError(f"a replay to {plan.target} ends at {replay.reached}")
            self._objects.optimizer.adam_step()  # all operators count the same steps again
            if not replay.witness.has_differed:
                self._carried.live = SurvivingState.dense(self._objects.scalars(replay.progress))
        self._laps.end("replay")
        self._objects.faults.strike_outside(FaultPoint.REPROTECT)
        if self._guarded is not None:
            self._memory.copies.await_second_holder(self._guarded)
            self._memory.generation.rest()  # who waits for others, below, is not late
        self._laps.end("reprotect")
        self._objects.faults.strike_outside(FaultPoint.REJOIN)
        self._rejoin_barrier.wait()
        self._laps.end("wait")
        ranks = self._gather()
        self._judge(ranks)
        self._carried.trusted = {}
        self._tell(plan.target, ranks)

    def went_back(self, step: int) -> None:
        """Tells of a rollback to a step once the job can go on."""
        self._laps.end("fetch")
        self._tell(step, self._gather())

    def _gather(self) -> list[RankAccount]:
        """Returns what each rank tells of the recovery."""
        replay = self.replay
        own = RankAccount(
            0 if replay is None else replay.reached - replay.start.committed,
            None if replay is None else replay.witness.proof,
            self._laps.durations_s,
            self._memory.copies.acknowledgements.owed_copies(),
            self._memory.copies.moved,
        )
        told = all_gather_json(own.document(), self._objects.device)
        return [RankAccount.of_document(one) for one in told]

    def _tell(self, target: int, ranks: Sequence[RankAccount]) -> None:
        """Reports what all ranks tell of the recovery, the restart before it included."""
        self._carried.outage = NO_OUTAGE
        own = ranks[dist.get_rank()]
        account = self._account(target, ranks)
        passes = self._objects.schedule.passes.since(self._passes)
        self._session.events.emit(
            EventName.RECOVERED,
            target,
            verdict=account.verdict,
            scope=account.scope,
            guarantee=account.level,
            replayed_steps=own.replayed_steps,
            replay_verified=own.verified,
            replay_proof=None if own.proof is None else own.proof.document(),
            forward_passes=passes.forward,
            backward_passes=passes.backward,
            duration_s=sum(self._laps.durations_s.values()),
            breakdown_s=self._laps.durations_s,
            rejoined_s=self._laps.ended_s,
            hashed_bytes=self._laps.hashed_bytes,
            owed_copies=own.owed_copies,
            moved_copies=own.moved_copies,
        )
        self._session.notices.say(account.line)
        self._session.recovered(account)

    def _judge(self, ranks: Sequence[RankAccount]) -> None:
        """Lets nobody train on a state that was promised and differs; on all ranks alike."""
        plan = self._plan
        doubts = {
            rank: doubt_of(plan, rank)
            for rank, own in zip(self._objects.layout.ranks, ranks, strict=True)
            if own.verified is False
        }
        consequence = consequence_of(self._carried.level, doubts.values())
        if not doubts:
            return
        wrong = proof_of_all(own.proof for own in ranks).words
        places = ", ".join(str(rank) for rank in doubts)
        self._session.events.emit(
            EventName.REPLAY_DIFFERED,
            plan.target,
            ranks=[str(rank) for rank in doubts],
            consequence=consequence.value,
            proof=wrong,
        )
        if consequence is Consequence.GO_ON:
            return
        if self.replay is not None:
            self._carried.live = GIVEN_UP
        found = {rank: trusted_copies(self._facts, plan, rank) for rank in doubts}
        self._carried.trusted = {**self._carried.trusted, **found}
        what = f"the replay up to step {plan.target} differs from the first time on {places}"
        if consequence is Consequence.AGAIN:
            raise UnverifiedReplayError(f"{what} ({wrong}); there are other copies to replay from")
        raise UnprovenStateError(
            f"{what} ({wrong}) though the guarantee is EXACT, and there is no other copy to replay "
            "from (`moevement clean` removes what is kept, to go on from a checkpoint)"
        )

    def _account(self, target: int, ranks: Sequence[RankAccount]) -> RecoveryAccount:
        """Puts together what the ranks tell; a replay that went wrong costs the guarantee."""
        plan = self._plan
        account = RecoveryAccount(
            generation=self._memory.generation.number,
            verdict=plan.verdict,
            scope=tuple(sorted(plan.start_of)),
            target=target,
            level=Level.EXACT,
            ranks=ranks,
        )
        promise = self._carried.promise
        if not account.verified:
            guarantee = unverified(promise.guarantee, plan.target)
            self._carried.promise = dataclasses.replace(promise, guarantee=guarantee)
        return dataclasses.replace(account, level=self._carried.level)
