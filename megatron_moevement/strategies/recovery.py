"""Recovery from memory: facts, plan, the ledger, who rolls forward, the slots that are lacking."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch.distributed as dist

from megatron_moevement.integrations.megatron.freezing import Freezing
from megatron_moevement.integrations.megatron.slot_layout import slot_layouts
from megatron_moevement.integrations.megatron.snapshots import LiveOperators
from megatron_moevement.policy.facts import Facts
from megatron_moevement.policy.newest_state import is_memory_newest
from megatron_moevement.policy.plan import Origin, Plan
from megatron_moevement.policy.recovery import plan_recovery
from megatron_moevement.policy.schedule import WindowSchedule
from megatron_moevement.runtime.agreement import all_gather_json
from megatron_moevement.runtime.ledger import LedgerEntry, loss_from_hex, loss_to_hex
from megatron_moevement.runtime.replication.state_reader import StateReader
from megatron_moevement.runtime.slots.journal import JournalState
from megatron_moevement.strategies.boundaries import ReplayedBoundaries
from megatron_moevement.strategies.kept import GIVEN_UP, Kept, Live
from megatron_moevement.strategies.left_state import alike_steps, gather_facts, read_left_state
from megatron_moevement.strategies.memory import DEADLINE, JobMemory
from megatron_moevement.strategies.own_slots import OwnSlots
from megatron_moevement.strategies.replay import Injection, Replay, Slots
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
    ) -> None:
        """Names what is recovered, and from where."""
        self._trained = trained
        self._memory = memory
        self._live = live
        self._kept = kept
        self._replicas = replicas
        self._survivor = Survivor(trained, kept)
        self._facts: Facts | None = None
        self._slots: OwnSlots | None = None

    def make_plan(self, durable: int) -> Plan | None:
        """Plans the recovery with all other ranks.

        Args:
            durable: k of the S_k that could be loaded or built instead.

        Returns:
            The plan; None when no process left anything, or `durable` is what to go on from.

        Raises:
            UserError: a store is another job's.
        """
        trained, log = self._trained, self._memory.log
        process = dataclasses.replace(
            read_left_state(self._memory.store, self._memory.host),
            live=self._kept.live.state,
            logs=() if log is None else log.extents(),
            holds=self._replicas.name,
            alike=range(0) if self._replicas.name is None else alike_steps(self._memory.store),
        )
        own = Facts(
            generation=self._memory.generation.number,
            layout=trained.layout,
            ends=trained.ends,
            durable=durable,
            processes=(process,),
        )
        facts = gather_facts(own, trained.device)
        if not is_memory_newest(facts):
            return None
        self._facts = facts
        plan = plan_recovery(facts)
        digests = set(all_gather_json(plan.digest, trained.device))
        assert len(digests) == 1, f"ranks have different plans: {sorted(digests)}"
        return plan

    def start_over(self, durable: int) -> None:
        """Gets ready to load a durable checkpoint, or to begin with the initial weights.

        Args:
            durable: the step of the checkpoint; 0: there is none.

        Raises:
            InitialStateLostError: there is none, and weights have changed since the start.
        """
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
        memory.open()
        ledger = self._share_ledger(plan)
        for rolling in plan.roll_forward:
            if rolling.rank == trained.rank:
                self._survivor.roll_forward(ledger.entry(rolling.step))
        self._survivor.reset()
        self._write_journal(plan, ledger)
        slots = self.own_slots(plan)
        if plan.copies:
            self._offer_state(plan)
        if origin_of(plan, stage) is Origin.WINDOW:
            assert plan.window is not None
            self._kept.live = GIVEN_UP
            sources = next(each for each in plan.slots if each.rank == trained.rank)
            slots.fetch_window(plan.window, sources.processes)
        else:
            slots.complete(plan.start(stage))
            self._copy_state(plan, slots, ledger)
            self._survivor.stand_by(self._live)
        dist.barrier()  # nobody overwrites a slot that another one still fetches
        memory.offer(None)
        return None if stage not in plan.start_of else self._replay(plan, ledger, freezing)

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
        if known is None or known.era != plan.era:
            state = self._state(plan, start)
            journal.restore_losses(ledger.losses)
            journal.write_state(state)
            known = state
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
