"""Recovery from memory: facts, plan, the ledger, who rolls forward, the slots that are lacking."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import torch.distributed as dist

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.freezing import Freezing
from megatron_moevement.integrations.megatron.slot_layout import slot_layouts
from megatron_moevement.integrations.megatron.snapshots import LiveOperators
from megatron_moevement.policy.facts.facts import Condition, Facts
from megatron_moevement.policy.facts.facts_document import FACTS, dump_facts
from megatron_moevement.policy.outcome.replay_doubt import within
from megatron_moevement.policy.recovery.eras import next_era, of_newest_history
from megatron_moevement.policy.recovery.newest_state import Durable
from megatron_moevement.policy.recovery.plan import Origin, Plan, WindowEdges
from megatron_moevement.policy.recovery.planner import (
    has_no_use_of_memory,
    plan_from_durable,
    plan_start,
)
from megatron_moevement.policy.recovery.rollforward import SETTLING, Settling
from megatron_moevement.policy.window.schedule import WindowSchedule
from megatron_moevement.runtime.coordination.agreement import (
    AgreementError,
    all_gather_json,
    together,
)
from megatron_moevement.runtime.coordination.commit_barrier import DisagreementError
from megatron_moevement.runtime.coordination.progress import Progress
from megatron_moevement.runtime.observation.events import EventName, Events
from megatron_moevement.runtime.peers.state_reader import StateReader
from megatron_moevement.settings.faults import Place
from megatron_moevement.strategies.moevement.kept import GIVEN_UP, Agreed, Kept, Live
from megatron_moevement.strategies.moevement.protection.first_captures import (
    FirstCaptures,
    OwnCaptures,
    first_captures,
    own_captures,
)
from megatron_moevement.strategies.moevement.protection.host_memory import DEADLINE, JobMemory
from megatron_moevement.strategies.moevement.protection.left_state import (
    alike_steps,
    gather_facts,
    read_left_state,
)
from megatron_moevement.strategies.moevement.recovery.boundaries import ReplayedBoundaries
from megatron_moevement.strategies.moevement.recovery.left_ledger import (
    LeftLedger,
    own_ledger,
    write_journal,
)
from megatron_moevement.strategies.moevement.recovery.own_slots import OwnSlots
from megatron_moevement.strategies.moevement.recovery.replay import Injection, Replay, Slots
from megatron_moevement.strategies.moevement.recovery.replay_witness import ReplayWitness
from megatron_moevement.strategies.moevement.recovery.replicas import (
    Replicas,
    StandingState,
    copy_state,
)
from megatron_moevement.strategies.moevement.recovery.survivors import Survivor
from megatron_moevement.strategies.scalars import decode_entry
from megatron_moevement.strategies.strategy import InitialStateLostError
from megatron_moevement.strategies.trained import Trained


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
        say: Callable[[str], None],
    ) -> None:
        """Names what is recovered, from where, and who is told of it."""
        self._trained = trained
        self._memory = memory
        self._live = live
        self._kept = kept
        self._replicas = replicas
        self._events = events
        self._say = say
        self._survivor = Survivor(trained, kept)
        self._facts: Facts | None = None
        self._eras: list[int] = []
        self._first: FirstCaptures = {}
        self._loaded: Live | None = None
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
        trained, agreed = self._trained, self._kept.agreed
        if agreed is not None and agreed.plan.generation == self._memory.generation.number:
            self._use(agreed.facts)
            self.is_continuing = True
            return agreed.plan  # live objects were built anew for it
        facts = self._look(durable)
        if has_no_use_of_memory(facts):
            with self._memory.generation.uninterrupted():
                taken = self._take_in()
            if self._kept.store.adopts:  # all ranks have taken in what they need
                taken += self._memory.look_for_left()
            if any(all_gather_json(taken, trained.device)):
                facts = self._look(durable)
        self._use(facts)
        if dist.get_rank() == 0:  # before anything is made of them
            self._events.keep(FACTS, dump_facts(facts))
        plan = plan_start(facts)
        if plan is None:
            return None
        digests = set(all_gather_json(plan.digest, trained.device))
        if len(digests) > 1:
            raise DisagreementError(f"ranks have different plans: {sorted(digests)}")
        trained.faults.strike_outside(Place.PLAN)
        self._kept.agreed = Agreed(facts, plan)
        self._tell(plan)
        return plan

    def _use(self, facts: Facts) -> None:
        self._facts, self._eras = of_newest_history(facts), [one.era for one in facts.processes]

    def plan_from(self, loaded: int, plan: Plan | None) -> Plan | None:
        """Returns the plan that holds once a checkpoint was loaded.

        Args:
            loaded: its step.
            plan: that it was loaded for; another one is made where no replay can begin with it.
        """
        if plan is None or not plan.is_from_durable or plan.windows_from == loaded:
            return plan
        assert self._facts is not None
        self._facts = dataclasses.replace(self._facts, durable=loaded)
        plan = plan_from_durable(self._facts, "the newest checkpoint can't be loaded")
        self._tell(plan)
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
            processes=tuple(
                within(each, self._kept.trusted)
                for each in (process, *self._memory.facts_of_spares())
            ),
        )
        facts = gather_facts(own, trained.device)
        self.is_continuing = facts.generation > 0 or any(
            each.committed is not None for each in facts.processes
        )
        newest = durable.newest(is_continuing=self.is_continuing)
        return dataclasses.replace(facts, durable=newest)

    def next_era(self) -> int:
        """Returns the era of a history that begins although no plan says so; all ranks call it."""
        (now, *_) = all_gather_json(int(time.time()), self._trained.device)
        return next_era(self._eras, now)

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

    def go_on_from(self, progress: Progress, live: LiveOperators) -> None:
        """Learns that what is durable was loaded: its progress, and the operators that hold it."""
        self._live, self._loaded = live, Live.dense(self._trained.scalars(progress))

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
        captures: list[OwnCaptures] = []
        if plan.edges is WindowEdges.KEPT:  # else slots are of other windows
            captures = [
                own_captures(memory.store, plan),
                *memory.captures_of_spares(plan.era, plan.epoch),
            ]
        if plan.is_from_durable and plan.edges is WindowEdges.ANEW:
            memory.store.clear_rings()  # its ledger stays: nothing else leads to the target
        told = memory.open(lambda: [captures, own_ledger(memory, plan)])
        captures = [each for several, _ in told for each in several]
        self._first = first_captures(trained.rank, plan, captures)
        ledger = LeftLedger.of_documents(one for _, one in told)
        self._come_to_target(plan, ledger)
        memory.begin_history()
        slots = self.own_slots(plan)
        if plan.copies:
            self._offer_state(plan)
        slots.fetch(plan.fetches_of(trained.rank))
        if plan.origin(stage) is not Origin.WINDOW:
            self._copy_state(plan, ledger)
            self._survivor.stand_by(self._live)
        dist.barrier()  # nobody overwrites a slot that another one still fetches
        memory.offer(None)
        return None if stage not in plan.start_of else self._replay(plan, ledger, freezing)

    def _come_to_target(self, plan: Plan, ledger: LeftLedger) -> None:
        """Applies the step that this rank lacks, if it rolls forward, and writes the journal.

        A state beyond what any journal says would be lost with the processes that were at it.
        """
        actions = {
            Settling.ROLL_FORWARD: lambda: self._roll_forward(plan, ledger),
            Settling.GIVE_UP: lambda: self._give_up(plan),
            Settling.RESET: self._survivor.reset,
            Settling.JOURNAL: lambda: self._write_journal(plan, ledger),
            Settling.BELONG: self._belong,
            Settling.TAKE_LOADED: self._take_loaded,
        }
        for action in SETTLING:
            actions[action]()

    def _roll_forward(self, plan: Plan, ledger: LeftLedger) -> None:
        for rolling in plan.roll_forward:
            if rolling.rank == self._trained.rank:
                with self._memory.generation.uninterrupted():
                    self._survivor.roll_forward(
                        ledger.entry(rolling.step), lambda: self._write_journal(plan, ledger)
                    )

    def _write_journal(self, plan: Plan, ledger: LeftLedger) -> None:
        write_journal(self._memory, plan, ledger, self._trained.rank)

    def _give_up(self, plan: Plan) -> None:
        if plan.gives_up(self._trained.rank.pp) and not self._kept.is_new:
            self._kept.live = GIVEN_UP

    def _belong(self) -> None:
        if self._kept.is_new:
            self._kept.live = GIVEN_UP  # from now on it knows what the job has agreed on

    def _take_loaded(self) -> None:
        if self._loaded is not None:
            self._kept.live = self._loaded

    def _offer_state(self, plan: Plan) -> None:
        """Lets who lost its state read that of this rank, and waits until all offer theirs."""
        if any(copy.source == self._memory.host.process for copy in plan.copies):
            self._memory.offer(StandingState(self._live, self._survivor.scalars))
        dist.barrier()  # until then sources roll forward

    def _copy_state(self, plan: Plan, ledger: LeftLedger) -> None:
        """Takes the lost state of this rank from a replica."""
        trained, memory = self._trained, self._memory
        copy = next((each for each in plan.copies if each.rank == trained.rank), None)
        if copy is None:
            return
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
        return self._memory.schedule_from(plan.windows_from, plan.epoch)

    def _replay(self, plan: Plan, ledger: LeftLedger, freezing: Freezing) -> Replay:
        trained, slots, kept = self._trained, None, None
        if plan.window is not None:
            schedule = self.schedule(plan)
            layouts = slot_layouts(schedule, trained.rank, self._live)
            slots = Slots(self._memory.own_ring, plan.window, schedule, layouts)
        if plan.origin(trained.rank.pp) is not Origin.WINDOW:
            kept = self._survivor.scalars.progress
        assert self._kept.guarantee is not None
        start = plan.start(trained.rank.pp)
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

    def _tell(self, plan: Plan) -> None:
        self._events.emit(
            EventName.PLAN,
            plan.target,
            verdict=plan.verdict.value,
            reason=plan.reason,
            target=plan.target,
            scope=sorted(plan.start_of),
            window=None if plan.window is None else plan.window.start,
            replayed_steps=plan.replayed_steps,
            lost_steps=plan.lost_steps,
            roll_forward=[str(one.rank) for one in plan.roll_forward],
            copies=[str(one.rank) for one in plan.copies],
            digest=plan.digest,
        )
        if dist.get_rank() == 0:
            self._say(f"{plan.verdict.value}: {plan.reason}")
