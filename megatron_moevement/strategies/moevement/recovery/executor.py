# SPDX-License-Identifier: Apache-2.0
"""Carrying out a plan on this rank: the ledger, who rolls forward, slots, copies, the replay."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch.distributed as dist

from megatron_moevement.integrations.megatron.freezing import Freezing
from megatron_moevement.integrations.megatron.slot_layout import slot_layouts
from megatron_moevement.policy.facts.facts import Condition, Facts, LiveState
from megatron_moevement.policy.recovery.lifecycle import Action, Event
from megatron_moevement.policy.recovery.plan import Origin, Plan, WindowEdges
from megatron_moevement.runtime.coordination.agreement import all_gather_json, broadcast_json
from megatron_moevement.strategies.moevement.carried_state import GIVEN_UP, SurvivingState
from megatron_moevement.strategies.moevement.protection.first_captures import (
    FirstCaptures,
    OwnCaptures,
    captures_for,
    first_captures,
    own_captures,
)
from megatron_moevement.strategies.moevement.recovery.boundaries import ReplayedBoundaries
from megatron_moevement.strategies.moevement.recovery.left_ledger import (
    LedgerDocument,
    LeftLedger,
    own_ledger,
    write_journal,
)
from megatron_moevement.strategies.moevement.recovery.replay import Replay, Slots
from megatron_moevement.strategies.moevement.recovery.replay_witness import ReplayWitness
from megatron_moevement.strategies.moevement.recovery.replicas import StandingState, copy_state
from megatron_moevement.strategies.moevement.recovery.slot_transfers import fetch_slots
from megatron_moevement.strategies.moevement.recovery.survivors import Survivor
from megatron_moevement.strategies.moevement.session import RankSession
from megatron_moevement.strategies.scalars import decode_entry
from megatron_moevement.strategies.strategy import InitialStateLostError


class Execution:
    """Carries out one plan; the training thread of every rank calls it."""

    def __init__(self, session: RankSession, facts: Facts, plan: Plan) -> None:
        """Names what is carried out.

        Args:
            facts: that the plan was made from, of the newest history.
            plan: RESUME, COPIED, LOCALIZED or GLOBAL.
        """
        self._session = session
        self._objects = session.objects
        self._memory = session.memory
        self._live = session.live
        self._carried = session.carried
        self._facts = facts
        self._plan = plan
        self._survivor = Survivor(session.objects, session.carried)
        self.own = plan.for_rank(session.objects.rank)
        """What the plan has for this rank."""
        self.history = session.schedules.history(
            plan.schedules.known, plan.rollbacks, plan.persisted
        )
        """The windows that the job goes on with, the same on every rank."""

    def carry_out(self, freezing: Freezing, loaded: SurvivingState | None) -> Replay | None:
        """Makes ready what the plan asks of this rank: to replay, or to stand by.

        Args:
            freezing: freezes operators that have not got their FULL state.
            loaded: the state that was loaded for the plan, if any.

        Returns:
            The replay, which `enter` begins; None for a bystander.
        """
        ledger, first = self._share()
        actions: dict[Action, Callable[[], None]] = {
            Action.ROLL_FORWARD: lambda: self._roll_forward(ledger),
            Action.GIVE_UP: self._give_up,
            Action.RESET: self._survivor.reset,
            Action.JOURNAL: lambda: self._write_journal(ledger),
            Action.BELONG: self._belong,
            Action.TAKE_LOADED: lambda: self._take(loaded),
            Action.SETTLE: lambda: self._session.generation.advance(Event.SETTLED),
            Action.OFFER: self._offer_state,
            Action.FETCH: lambda: fetch_slots(self._memory, self.own),
            Action.COPY: lambda: self._copy_state(ledger),
            Action.STAND_BY: self._stand_by,
            Action.AWAIT_ALL: self._await_all,
        }
        for action in Action:
            actions[action]()
        return None if self.own.origin is None else self._replay(ledger, freezing, first)

    def recall(self) -> None:
        """Takes from the ledgers what is known of the experts; every rank calls it at the end."""
        popularity, own = self._session.schedules.popularity, self._objects
        popularity.recall(self._memory.journal, own.device, self._plan.rolled(own.rank))

    def _share(self) -> tuple[LeftLedger, FirstCaptures]:
        """Drops what is of no use, and puts together what all ranks have of ledger and captures."""
        memory, plan, rank = self._memory, self._plan, self._objects.rank
        if self._facts.by_rank[rank].rollbacks != plan.rollbacks:
            memory.store.clear()  # of another history: its slots may have equal names
        captures: list[OwnCaptures] = []
        if plan.edges is WindowEdges.KEPT:  # else slots are of other windows
            captures = [
                own_captures(memory.store, plan),
                *memory.captures_of_spares(plan.rollbacks, self.history.timetable.first_version),
            ]
        if plan.is_from_durable and plan.edges is WindowEdges.RESTARTED:
            memory.store.clear_rings()  # its ledger stays: nothing else leads to the target
        ledgers: list[LedgerDocument | None] = []

        def tell() -> list[OwnCaptures]:
            ledgers.append(own_ledger(memory, plan))
            return captures

        told = memory.open(tell, lambda told: captures_for(rank, told))
        ledger = LeftLedger.of_document(
            broadcast_json(ledgers[0], self._source, self._objects.device)
        )
        return ledger, first_captures(rank, plan, chain.from_iterable(told))

    @property
    def _source(self) -> int:
        """The rank that has the ledger, or speaks for who has it."""
        ranks, by_rank = self._objects.layout.ranks, self._facts.by_rank
        having = (by_rank[rank].process == self._plan.ledger_source for rank in ranks)
        return next((number for number, has in enumerate(having) if has), 0)

    def _roll_forward(self, ledger: LeftLedger) -> None:
        for step in self._plan.rolled(self._objects.rank):
            with self._memory.generation.uninterrupted():
                self._survivor.roll_forward(ledger.entry(step), lambda: self._write_journal(ledger))

    def _write_journal(self, ledger: LeftLedger) -> None:
        journal, target = self._memory.journal, self._plan.target
        write_journal(journal, self.history, target, ledger, self._objects.rank)

    def _give_up(self) -> None:
        if self._plan.gives_up(self._objects.rank.pp) and not self._carried.is_new:
            self._carried.live = GIVEN_UP

    def _belong(self) -> None:
        if self._carried.is_new:
            self._carried.live = GIVEN_UP  # from now on it knows what the job has agreed on

    def _take(self, loaded: SurvivingState | None) -> None:
        if loaded is not None:
            self._carried.live = loaded

    def _offer_state(self) -> None:
        """Lets who lost its state read that of this rank, and waits until all offer theirs."""
        self._memory.begin_history()
        if not self._plan.copies:
            return
        if any(copy.source == self._memory.host.process for copy in self._plan.copies):
            self._memory.offer(StandingState(self._live, self._carried.scalars))
        dist.barrier()  # until then sources roll forward

    def _copy_state(self, ledger: LeftLedger) -> None:
        """Takes the state of this rank from a replica, if it has lost it."""
        objects, memory, source = self._objects, self._memory, self.own.copied_from
        if source is None or self.own.origin is Origin.WINDOW:
            return
        self._carried.live = GIVEN_UP
        state_bytes = sum(operator.full_bytes for operator in self._live.operators)
        with memory.read_state(source, state_bytes) as reader:
            scalars = copy_state(reader, objects, self._live, self._plan.target)
        objects.ledger.restore_losses(ledger.losses)
        self._carried.live = SurvivingState.dense(scalars)

    def _stand_by(self) -> None:
        if self.own.origin is not Origin.WINDOW:
            self._survivor.stand_by(self._live)

    def _await_all(self) -> None:
        dist.barrier()  # nobody overwrites a slot that another one still fetches
        self._memory.offer(None)

    def boundaries(self) -> ReplayedBoundaries:
        """Returns between whom the stages of the plan replay."""
        plan, rank, stages = self._plan, self._objects.rank, range(self._objects.layout.pp)
        occupants = {stage: self._facts.by_rank[rank._replace(pp=stage)] for stage in stages}
        return ReplayedBoundaries(
            begins={stage: plan.start(stage) for stage in stages},
            processes={stage: occupant.process for stage, occupant in occupants.items()},
            target=plan.target,
        )

    def _replay(self, ledger: LeftLedger, freezing: Freezing, first: FirstCaptures) -> Replay:
        objects, plan, own, slots = self._objects, self._plan, self.own, None
        if plan.window is not None:
            schedule = self.history.schedule_of(plan.window)
            layouts = slot_layouts(schedule, objects.rank, self._live)
            slots = Slots(self._memory.own_ring, plan.window, layouts)
        begins = self._carried.live
        if slots is not None and own.converts:
            state = LiveState(Condition.PARTIAL, own.start, slots.window)
            if own.origin is Origin.KEPT:
                # All ranks of the stage put the last slot back where one of them lacks it.
                self._carried.live = begins = SurvivingState(state, self._carried.scalars)
            else:
                begins = SurvivingState(state, slots.scalars(0))
        objects.ledger.restore_losses(
            {step: loss for step, loss in ledger.losses.items() if step <= own.start}
        )
        entries = {step: decode_entry(text) for step, text in ledger.entries.items()}
        witness = ReplayWitness(first, plan.target, self._carried.level)
        return Replay(
            self._session, freezing, slots, plan, entries=entries, witness=witness, begins=begins
        )


def start_over(session: RankSession, durable: int) -> None:
    """Gets ready to load a durable checkpoint, or to begin with the initial weights.

    Args:
        durable: step of the checkpoint; 0 is the initial state.

    Raises:
        InitialStateLostError: there is none, and weights have changed since the start.
    """
    objects, memory, carried = session.objects, session.memory, session.carried
    pristine = all_gather_json(carried.is_pristine, objects.device)
    if durable == 0 and not all(pristine):
        raise InitialStateLostError(
            f"process {pristine.index(False)} has trained, no window in memory is whole and "
            "there is no durable checkpoint: the job has to be built again"
        )
    Survivor(objects, carried).reset()
    if durable:
        carried.live = GIVEN_UP  # until the checkpoint is loaded and `begin` says so
    elif carried.live.scalars is not None:
        objects.restore(carried.live.scalars)
    if memory.log is not None:
        memory.log.clear()
