"""Recovery from memory: facts, plan, the slots that this rank lacks, the ledger, second copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch.distributed as dist

from megatron_moevement.integrations.megatron.freezing import Freezing
from megatron_moevement.integrations.megatron.slot_layout import slot_layouts
from megatron_moevement.integrations.megatron.snapshots import LiveOperators
from megatron_moevement.policy.facts import Facts
from megatron_moevement.policy.plan import Plan
from megatron_moevement.policy.recovery import plan_recovery
from megatron_moevement.policy.schedule import Window
from megatron_moevement.runtime.agreement import all_gather_json
from megatron_moevement.runtime.ledger import loss_from_hex, loss_to_hex
from megatron_moevement.runtime.slots.journal import JournalState
from megatron_moevement.strategies.left_state import gather_facts, read_left_state
from megatron_moevement.strategies.memory import JobMemory
from megatron_moevement.strategies.replay import Replay, Slots
from megatron_moevement.strategies.scalars import decode_entry
from megatron_moevement.strategies.trained import Trained


@dataclasses.dataclass(frozen=True)
class _LeftLedger:
    """What a process that has all of it says of the steps up to the target."""

    entries: Mapping[int, bytes]
    losses: Mapping[int, float]


class MemoryRecovery:
    """Recovers a job of which no process is left, from what the processes left in memory.

    All methods are called by the training thread of every rank.
    """

    def __init__(self, trained: Trained, memory: JobMemory, live: LiveOperators) -> None:
        """Names what is recovered, and from where."""
        self._trained = trained
        self._memory = memory
        self._live = live
        self._facts: Facts | None = None

    def make_plan(self, durable: int) -> Plan | None:
        """Plans the recovery with all other ranks.

        Args:
            durable: k of the S_k that could be loaded or built instead.

        Returns:
            The plan; None when no process left anything, or `durable` is newer than all they left.

        Raises:
            UserError: a store is another job's.
        """
        trained = self._trained
        own = Facts(
            generation=self._memory.generation.number,
            layout=trained.layout,
            ends=trained.ends,
            durable=durable,
            processes=(read_left_state(self._memory.store, self._memory.host),),
        )
        facts = gather_facts(own, trained.device)
        committed = [each.committed for each in facts.processes if each.committed is not None]
        if not committed or max(committed) <= durable:
            return None
        self._facts = facts
        plan = plan_recovery(facts)
        digests = set(all_gather_json(plan.digest, trained.device))
        assert len(digests) == 1, f"ranks have different plans: {sorted(digests)}"
        return plan

    def carry_out(self, plan: Plan, freezing: Freezing) -> Replay:
        """Fetches what this rank lacks, gives second copies to who lacks them, begins the replay.

        Args:
            plan: GLOBAL, with a window.
            freezing: freezes operators that have not got their FULL state.
        """
        assert self._facts is not None
        assert plan.window is not None
        trained, memory, window = self._trained, self._memory, plan.window
        memory.open()
        ledger = self._share_ledger(plan)
        self._write_journal(plan, ledger)
        sources = next(each for each in plan.slots if each.rank == trained.rank)
        for slot, process in enumerate(sources.processes, start=sources.first_slot):
            if process != memory.host.process:
                memory.copies.fetch(process, window, slot)
        self._protect(window)
        dist.barrier()  # nobody overwrites a slot that another one still fetches
        memory.forget_others()
        schedule = memory.schedule_from(window.start, window.epoch)
        slots = Slots(
            memory.own_ring, window, schedule, slot_layouts(schedule, trained.rank, self._live)
        )
        trained.ledger.restore_losses(
            {step: loss for step, loss in ledger.losses.items() if step <= window.start}
        )
        entries = {step: decode_entry(text) for step, text in ledger.entries.items()}
        return Replay(trained, self._live, freezing, slots, entries=entries, target=plan.target)

    def _share_ledger(self, plan: Plan) -> _LeftLedger:
        """Returns the ledger after the window's start, and all losses, from who has all of it."""
        assert plan.window is not None
        document = None
        if self._memory.host.process == plan.ledger_source:
            journal = self._memory.journal
            steps = range(plan.window.start + 1, plan.target + 1)
            document = {
                "entries": {step: journal.entry(step).decode() for step in steps},
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
        assert plan.window is not None
        journal = self._memory.journal
        known = journal.state
        if known is None or known.era != plan.era:
            state = self._state(plan, plan.window.start)
            journal.restore_losses(ledger.losses)
            journal.write_state(state)
            known = state
        first = max(known.committed, plan.window.start) + 1
        for step in range(first, plan.target + 1):
            loss = ledger.losses.get(step)
            journal.commit(self._state(plan, step), step, ledger.entries[step], loss)
        journal.write_state(self._state(plan, plan.target))

    def _state(self, plan: Plan, committed: int) -> JournalState:
        assert plan.window is not None
        return JournalState(
            era=plan.era,
            epoch=plan.window.epoch,
            committed=committed,
            persisted=plan.persisted,
            rank=self._trained.rank,
        )

    def _protect(self, window: Window) -> None:
        """Sends the window's slots to the holders that lack them and waits until they have them."""
        assert self._facts is not None
        holders = self._memory.plan.placement.holders[self._trained.rank]
        having = {
            facts.process: holding.slots
            for facts in self._facts.processes
            for holding in facts.holdings
            if (holding.owner, holding.window) == (self._trained.rank, window)
        }
        for slot in range(window.size):
            lacking = [each for each in holders if not having.get(each, 0) >> slot & 1]
            record = self._memory.own_ring.record(window.step_of(slot))
            assert record is not None
            self._memory.copies.land_for(record, lacking)
        self._memory.copies.await_complete(window)
