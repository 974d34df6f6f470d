"""Recovery from memory: facts, plan, the ledger, who rolls forward, the slots that are lacking."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

import torch.distributed as dist

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.freezing import Freezing
from megatron_moevement.integrations.megatron.slot_layout import slot_layouts
from megatron_moevement.integrations.megatron.snapshots import LiveOperators
from megatron_moevement.policy.eras import next_era
from megatron_moevement.policy.facts import Condition, Facts
from megatron_moevement.policy.facts_document import FACTS, dump_facts
from megatron_moevement.policy.newest_state import Durable
from megatron_moevement.policy.plan import Origin, Plan
from megatron_moevement.policy.ranks import LogicalRank
from megatron_moevement.policy.recovery import has_no_use_of_memory, plan_start
from megatron_moevement.policy.replay_doubt import Doubt, doubt_of, without
from megatron_moevement.policy.rollforward import SETTLING, Settling
from megatron_moevement.policy.schedule import WindowSchedule
from megatron_moevement.runtime.agreement import AgreementError, all_gather_json, together
from megatron_moevement.runtime.commit_barrier import DisagreementError
from megatron_moevement.runtime.events import Events
from megatron_moevement.runtime.ledger import LedgerEntry, loss_from_hex, loss_to_hex
from megatron_moevement.runtime.replication.state_reader import StateReader
from megatron_moevement.runtime.slots.journal import JournalState
from megatron_moevement.settings.faults import Place
from megatron_moevement.strategies.boundaries import ReplayedBoundaries
from megatron_moevement.strategies.kept import GIVEN_UP, Kept, Live
from megatron_moevement.strategies.left_state import alike_steps, gather_facts, read_left_state
from megatron_moevement.strategies.memory import DEADLINE, JobMemory
from megatron_moevement.strategies.own_slots import OwnSlots
from megatron_moevement.strategies.replay import Injection, Replay, Slots
from megatron_moevement.strategies.replay_witness import (
    FirstCaptures,
    ReplayWitness,
    first_captures,
)
from megatron_moevement.strategies.replicas import Replicas, StandingState, copy_state
from megatron_moevement.strategies.scalars import decode_entry
from megatron_moevement.strategies.strategy import InitialStateLostError
from megatron_moevement.strategies.survivors import Survivor
from megatron_moevement.strategies.trained import Trained


@dataclasses.dataclass(frozen=True)
class _LeftLedger:
    """What a process that has all of it says of the steps up to the target.

    Attributes:
        entries: of the steps that anybody replays or applies.
        losses: of all steps.
    """

    entries: Mapping[int, bytes]
    losses: Mapping[int, float]

    def entry(self, step: int) -> LedgerEntry:
        """Returns the entry of a step."""
        return decode_entry(self.entries[step])


def origin_of(plan: Plan, stage: int) -> Origin | None:
    """Returns what a stage replays from; None where it stands by."""
    return next((replay.origin for replay in plan.replays if replay.stage == stage), None)


class MemoryRecovery:
    """Recovers a job from what its processes hold: those that live, and what others left.

    All methods are called by the training thread of every rank.
    """

    def __init__(
        self,
        trained: Trained,
        memory: JobMemory,
        live: LiveOperators,
        kept: Kept,
        replicas: Replicas,
        *,
        events: Events,
    ) -> None:
        """Names what is recovered, and from where."""
        self._trained = trained
        self._memory = memory
        self._live = live
        self._kept = kept
        self._replicas = replicas
        self._events = events
        self._survivor = Survivor(trained, kept)
        self._facts: Facts | None = None
        self._first: FirstCaptures = {}
        self._slots: OwnSlots | None = None
        self.is_continuing = False
        """Whether the job has trained before, as far as its processes know."""

    def make_plan(self, durable: Durable) -> Plan | None:
        """Plans the recovery with all other ranks.

        Args:
            durable: what could be loaded instead, as all ranks see it.

        Returns:
            The plan; None when a launch finds nothing that is newer than what it loads.

        Raises:
            UserError: a store is another job's.
        """
        trained = self._trained
        facts = self._look(durable)
        if has_no_use_of_memory(facts):
            with self._memory.generation.uninterrupted():
                taken = self._take_in()
            if any(all_gather_json(taken, trained.device)):
                facts = self._look(durable)
        self._facts = facts
        if dist.get_rank() == 0:  # before anything is made of them
            self._events.keep(FACTS, dump_facts(facts))
        plan = plan_start(facts)
        if plan is None:
            return None
        digests = set(all_gather_json(plan.digest, trained.device))
        if len(digests) > 1:
            raise DisagreementError(f"ranks have different plans: {sorted(digests)}")
        trained.faults.strike_outside(Place.PLAN)
        return plan

    def _take_in(self) -> tuple[int, ...]:
        """Takes in what no process of a rank has found as its own; all ranks call it."""
        rank, ranks = self._trained.rank, self._trained.layout.ranks
        try:
            return together(lambda: self._kept.store.take_in(rank, ranks), self._trained.device)
        except AgreementError as error:
            raise UserError(error.reason) from error

    def _look(self, durable: Durable) -> Facts:
        """Returns the facts of all processes, as their stores and live objects are now."""
        trained, log = self._trained, self._memory.log
        trained.faults.strike_outside(Place.FACTS)
        left, state = read_left_state(self._memory.store, self._memory.host), self._kept.live.state
        committed = left.committed
        if committed is not None and state.condition is Condition.DENSE:
            committed = max(committed, state.step)  # a state that is there was committed
        process = dataclasses.replace(
            left,
            committed=committed,
            live=state,
            holdings=without(left.holdings, self._kept.doubted),
            logs=() if log is None else log.extents(),
            is_new=self._kept.is_new,
            holds=self._replicas.name,
            alike=range(0) if self._replicas.name is None else alike_steps(self._memory.store),
        )
        own = Facts(
            generation=self._memory.generation.number,
            layout=trained.layout,
            ends=trained.ends,
            durable=durable.loadable,
            processes=(process,),
        )
        facts = gather_facts(own, trained.device)
        self.is_continuing = facts.generation > 0 or any(
            each.committed is not None for each in facts.processes
        )
        newest = durable.newest(is_continuing=self.is_continuing)
        return dataclasses.replace(facts, durable=newest)

    def next_era(self) -> int:
        """Returns the era of a history that begins although no plan says so; all ranks call it."""
        assert self._facts is not None
        (now, *_) = all_gather_json(int(time.time()), self._trained.device)
        return next_era((process.era for process in self._facts.processes), now)

    def start_over(self) -> None:
        """Gets ready to load a durable checkpoint, or to begin with the initial weights.

        Raises:
            InitialStateLostError: there is none, and weights have changed since the start.
        """
        assert self._facts is not None
        durable = self._facts.durable
        pristine = all_gather_json(self._kept.is_pristine, self._trained.device)
        if durable == 0 and not all(pristine):
            raise InitialStateLostError(
                f"process {pristine.index(False)} has trained, no window in memory is whole and "
                "there is no durable checkpoint: the job has to be built anew"
            )
        self._survivor.reset()
        if durable:
            self._kept.live = GIVEN_UP  # until the checkpoint is loaded and `begin` says so
        elif self._kept.live.scalars is not None:
            self._trained.restore(self._kept.live.scalars)
        if self._memory.log is not None:
            self._memory.log.clear()

    def carry_out(self, plan: Plan, freezing: Freezing) -> Replay | None:
        """Makes ready what a plan asks of this rank: to replay, or to stand by.

        Args:
            plan: RESUME, COPIED, LOCALIZED or GLOBAL.
            freezing: freezes operators that have not got their FULL state.

        Returns:
            The replay, which `enter` begins; None for a bystander.
        """
        trained, memory, stage = self._trained, self._memory, self._trained.rank.pp
        assert self._facts is not None
        if self._facts.by_rank[trained.rank].era != plan.era:
            memory.store.clear()  # of another history: its slots may have equal names
        self._first = first_captures(memory.store, plan, trained.rank, trained.device)
        memory.open()
        ledger = self._share_ledger(plan)
        self._come_to_target(plan, ledger)
        slots = self.own_slots(plan)
        if plan.copies:
            self._offer_state(plan)
        if origin_of(plan, stage) is Origin.WINDOW:
            assert plan.window is not None
            sources = next(each for each in plan.slots if each.rank == trained.rank)
            slots.fetch_window(plan.window, sources.processes)
        else:
            slots.complete(plan.start(stage))
            self._copy_state(plan, slots, ledger)
            self._survivor.stand_by(self._live)
        dist.barrier()  # nobody overwrites a slot that another one still fetches
        memory.offer(None)
        return None if stage not in plan.start_of else self._replay(plan, ledger, freezing)

    def _come_to_target(self, plan: Plan, ledger: _LeftLedger) -> None:
        """Applies the step that this rank lacks, if it rolls forward, and writes the journal.

        A state beyond what any journal says would be lost with the processes that were at it.
        """
        actions = {
            Settling.ROLL_FORWARD: lambda: self._roll_forward(plan, ledger),
            Settling.GIVE_UP: lambda: self._give_up(plan),
            Settling.RESET: self._survivor.reset,
            Settling.JOURNAL: lambda: self._write_journal(plan, ledger),
            Settling.BELONG: self._belong,
        }
        for action in SETTLING:
            actions[action]()

    def _roll_forward(self, plan: Plan, ledger: _LeftLedger) -> None:
        for rolling in plan.roll_forward:
            if rolling.rank == self._trained.rank:
                with self._memory.generation.uninterrupted():
                    self._survivor.roll_forward(
                        ledger.entry(rolling.step), lambda: self._write_journal(plan, ledger)
                    )

    def _give_up(self, plan: Plan) -> None:
        goes_back = origin_of(plan, self._trained.rank.pp) is Origin.WINDOW
        if goes_back and not self._kept.is_new:
            self._kept.live = GIVEN_UP

    def _belong(self) -> None:
        if self._kept.is_new:
            self._kept.live = GIVEN_UP

    def _offer_state(self, plan: Plan) -> None:
        """Lets who lost its state read that of this rank, and waits until all offer theirs."""
        if any(copy.source == self._memory.host.process for copy in plan.copies):
            self._memory.offer(StandingState(self._live, self._survivor.scalars))
        dist.barrier()  # until then sources roll forward

    def _copy_state(self, plan: Plan, slots: OwnSlots, ledger: _LeftLedger) -> None:
        """Takes the lost state of this rank from a replica, and what of its slots nobody has."""
        trained, memory = self._trained, self._memory
        copy = next((each for each in plan.copies if each.rank == trained.rank), None)
        if copy is None:
            return
        slots.take_from_replica(copy)
        self._kept.live = GIVEN_UP
        assert memory.session is not None
        address = memory.peers[copy.source]
        with StateReader(memory.session, copy.source, address, deadline=DEADLINE) as reader:
            scalars = copy_state(reader, trained, self._live, plan.target)
        trained.ledger.restore_losses(ledger.losses)
        self._kept.live = Live.dense(scalars)

    def own_slots(self, plan: Plan) -> OwnSlots:
        """Returns this rank's slots: as the facts tell of them, and what was fetched since."""
        assert self._facts is not None
        if self._slots is None:
            self._slots = OwnSlots(self._memory, self._facts, self._trained.rank, plan)
        return self._slots

    def doubt(self, plan: Plan, rank: LogicalRank) -> Doubt:
        """Returns what the replay of a rank began with, the same on all ranks."""
        assert self._facts is not None
        return doubt_of(plan, self._facts.processes, rank)

    def boundaries(self, plan: Plan) -> ReplayedBoundaries:
        """Returns between whom the stages of a plan replay."""
        assert self._facts is not None
        rank = self._trained.rank
        return ReplayedBoundaries(
            begins={stage: plan.start(stage) for stage in range(self._trained.layout.pp)},
            processes={
                stage: self._facts.by_rank[dataclasses.replace(rank, pp=stage)].process
                for stage in range(self._trained.layout.pp)
            },
            target=plan.target,
        )

    def schedule(self, plan: Plan) -> WindowSchedule:
        """Returns the schedule that windows go on under, the same on every rank."""
        assert self._facts is not None
        if plan.window is not None:
            return self._memory.schedule_from(plan.window.start, plan.window.epoch)
        starts = [
            holding.window.start
            for process in self._facts.processes
            if process.era == plan.era
            for holding in process.holdings
        ]
        return self._memory.schedule_from(min(starts, default=plan.target), plan.epoch)

    def _replay(self, plan: Plan, ledger: _LeftLedger, freezing: Freezing) -> Replay:
        trained, window = self._trained, plan.window
        assert window is not None
        schedule = self.schedule(plan)
        slots = Slots(
            self._memory.own_ring,
            window,
            schedule,
            slot_layouts(schedule, trained.rank, self._live),
        )
        kept = None
        if origin_of(plan, trained.rank.pp) is Origin.KEPT:
            kept = self._survivor.scalars.progress
        assert self._kept.guarantee is not None
        start = window.start if kept is None else kept.committed
        trained.ledger.restore_losses(
            {step: loss for step, loss in ledger.losses.items() if step <= start}
        )
        return Replay(
            trained,
            self._live,
            freezing,
            slots,
            entries={step: decode_entry(text) for step, text in ledger.entries.items()},
            target=plan.target,
            witness=ReplayWitness(self._first, plan.target, self._kept.guarantee.level),
            injection=Injection.ALWAYS if plan.is_apart else Injection.WHILE_FROZEN,
            kept=kept,
        )

    def _share_ledger(self, plan: Plan) -> _LeftLedger:
        """Returns the ledger of the steps that are done again, and all losses, from who has it."""
        first = plan.first_ledger_step
        document = None
        if self._memory.host.process == plan.ledger_source:
            journal = self._memory.journal
            document = {
                "entries": {
                    step: journal.entry(step).decode()
                    for step in range(max(first, journal.entries().start), plan.target + 1)
                },
                "losses": {
                    step: loss_to_hex(loss)
                    for step, loss in journal.losses().items()
                    if step <= plan.target
                },
            }
        found = next(one for one in all_gather_json(document, self._trained.device) if one)
        return _LeftLedger(
            entries={int(step): text.encode() for step, text in found["entries"].items()},
            losses={int(step): loss_from_hex(text) for step, text in found["losses"].items()},
        )

    def _write_journal(self, plan: Plan, ledger: _LeftLedger) -> None:
        """Makes this process's journal say what the job knows."""
        journal = self._memory.journal
        known = journal.state
        start = min(ledger.entries, default=plan.target + 1) - 1
        journal.restore_losses(ledger.losses)
        if known is None or known.era != plan.era:
            known = self._state(plan, start)
            journal.write_state(known)
        for step in range(max(known.committed, start) + 1, plan.target + 1):
            loss = ledger.losses.get(step)
            journal.commit(self._state(plan, step), step, ledger.entries[step], loss)
        journal.write_state(self._state(plan, plan.target))

    def _state(self, plan: Plan, committed: int) -> JournalState:
        return JournalState(
            era=plan.era,
            epoch=plan.epoch if plan.window is None else plan.window.epoch,
            committed=committed,
            persisted=plan.persisted,
            rank=self._trained.rank,
        )
