# SPDX-License-Identifier: Apache-2.0
"""Planning a recovery: the facts of all processes, and the plan that all of them make alike."""

from __future__ import annotations

import dataclasses
import logging
import time

import torch.distributed as dist

from megatron_moevement.errors import UserError
from megatron_moevement.policy.facts.facts import Condition, Facts, InconsistentFactsError
from megatron_moevement.policy.facts.facts_document import FACTS, dump_facts
from megatron_moevement.policy.outcome.replay_doubt import within
from megatron_moevement.policy.recovery.histories import next_rollbacks, of_newest_history
from megatron_moevement.policy.recovery.newest_state import Durable
from megatron_moevement.policy.recovery.plan import Plan
from megatron_moevement.policy.recovery.recovery_planner import (
    has_no_use_of_memory,
    plan_from_durable,
    plan_start,
)
from megatron_moevement.runtime.coordination.agreement import (
    all_gather_json,
    as_user_error,
    gather_unlike,
    together,
)
from megatron_moevement.runtime.coordination.commit_barrier import DisagreementError
from megatron_moevement.runtime.observation.events import EventName
from megatron_moevement.runtime.stores.origin_file import Origin, write_origin
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.strategies.moevement.agreed_guarantee import agree_with_origin
from megatron_moevement.strategies.moevement.carried_state import GIVEN_UP, Agreed
from megatron_moevement.strategies.moevement.protection.left_state import (
    gather_facts,
    read_left_state,
    rng_equal_steps,
)
from megatron_moevement.strategies.moevement.recovery.replicas import Replicas
from megatron_moevement.strategies.moevement.session import RankSession
from megatron_moevement.strategies.moevement.tiers.resume import (
    Outcome,
    Restored,
    restore_newest,
)

logger = logging.getLogger(__name__)


class Planning:
    """Plans the recovery of one generation; the training thread of every rank calls it."""

    def __init__(self, session: RankSession, replicas: Replicas) -> None:
        """Names what facts are read from."""
        self._session = session
        self._objects = session.objects
        self._memory = session.memory
        self._carried = session.carried
        self._replicas = replicas

    def start(self, durable: Durable) -> Agreed:
        """Plans with all other ranks.

        Args:
            durable: what could be loaded instead, as all ranks see it.

        Raises:
            UserError: a store is another job's.
        """
        objects, agreed = self._objects, self._carried.agreed
        if agreed is not None and agreed.facts.generation == self._memory.generation.number:
            return dataclasses.replace(agreed, is_continuing=True)  # objects are anew
        facts, newest, plan = self._propose(durable)
        if has_no_use_of_memory(plan) and self._finds_more():
            facts, newest, plan = self._propose(durable)
        eras = tuple(process.rollbacks for process in facts.processes)
        outcome = self._look_for_tier(facts, plan)
        if outcome.is_cleared:
            facts, newest, plan = self._propose(durable)
            eras += tuple(process.rollbacks for process in facts.processes)
        self._keep(facts)
        agreed = Agreed(newest, plan, eras, facts.is_continuing)
        if plan is not None:
            if unlike := gather_unlike(plan.digest, objects.device):
                raise DisagreementError(f"ranks have different plans: {sorted(set(unlike))}")
            objects.faults.strike_outside(FaultPoint.PLAN)
            self._carried.agreed = agreed
            self._tell(plan, outcome.trained_again)
        return agreed

    def _propose(self, durable: Durable) -> tuple[Facts, Facts, Plan | None]:
        """Returns the facts of all processes, those of the newest history, and their plan."""
        facts = self._look(durable)
        try:
            newest = of_newest_history(facts)
            return facts, newest, plan_start(newest)
        except InconsistentFactsError:
            self._keep(facts)
            raise

    def loaded(self, agreed: Agreed, step: int) -> Agreed:
        """Returns what holds once a checkpoint was loaded.

        Args:
            agreed: before it was.
            step: of the checkpoint; another plan is made where no replay can begin with it.
        """
        plan = agreed.plan
        if plan is None or not plan.is_from_durable or plan.loaded == step:
            return agreed
        facts = dataclasses.replace(agreed.facts, durable=step)
        plan = plan_from_durable(facts, "the newest checkpoint can't be loaded")
        self._tell(plan)
        return dataclasses.replace(agreed, facts=facts, plan=plan)

    def next_rollbacks(self, agreed: Agreed) -> int:
        """Returns the era of a history that begins although no plan says so; all ranks call it."""
        (now_s, *_) = all_gather_json(int(time.time()), self._objects.device)
        return next_rollbacks(agreed.eras, now_s)

    def _finds_more(self) -> bool:
        """Returns whether any rank finds more than processes held; all ranks call it."""
        with self._memory.generation.uninterrupted():
            taken = self._take_in()
        if self._carried.store.adopts:  # all ranks have taken in what they need
            taken += self._memory.look_for_left()
        return any(all_gather_json(taken, self._objects.device))

    def _look_for_tier(self, facts: Facts, plan: Plan | None) -> Outcome:
        """Puts a tier into memory where none of the processes leads as far."""
        tiers = self._session.tiers
        if tiers is None:
            return Outcome()
        gave_up = []

        def give_up() -> None:
            gave_up.append(True)
            self._give_up()

        try:
            outcome = restore_newest(
                *(tiers.target, self._memory, self._objects, facts, plan),
                give_up=give_up,
                notices=self._session.notices,
            )
            if outcome.restored is not None:
                self._take_over(outcome.restored)
        except UserError as error:
            if all(process.is_new for process in facts.processes):
                raise  # a launch must not begin at the first step by mistake
            if dist.get_rank() == 0:
                logger.warning("%s; the restart goes on without a tier", error)
            if gave_up:
                self._memory.store.clear()  # some ranks may have put there what others have not
            return Outcome(is_cleared=bool(gave_up))
        return outcome

    def _take_over(self, restored: Restored) -> None:
        """Agrees on the guarantee of what memory has now, and notes what it lacks beside it."""
        before = self._carried.promise.guarantee
        guarantee = agree_with_origin(restored.computations, self._carried)
        if guarantee != before:
            self._session.notices.say(f"guarantee {guarantee}")
        if guarantee.lacking:
            origin = Origin(restored.name.committed, guarantee.lacking)
            folder = self._memory.store.folder
            with as_user_error(f"can't write into {folder}: "):
                together(lambda: write_origin(folder, origin), self._objects.device)

    def _give_up(self) -> None:
        """Gives up the state of this process and its log, which are of steps after a tier's."""
        if not self._carried.is_new:
            self._carried.live = GIVEN_UP
        self._carried.trusted = {}  # copies of slots that no process has any more
        if self._memory.log is not None:
            self._memory.log.clear()

    def _keep(self, facts: Facts) -> None:
        """Writes down what a plan is made from, before anything is done or where none comes."""
        if dist.get_rank() == 0:
            self._session.events.keep(FACTS, dump_facts(facts))

    def _take_in(self) -> tuple[int, ...]:
        """Takes in what no process of a rank has found as its own; all ranks call it."""
        rank, ranks = self._objects.rank, self._objects.layout.ranks
        with as_user_error():
            return together(lambda: self._carried.store.take_in(rank, ranks), self._objects.device)

    def _look(self, durable: Durable) -> Facts:
        """Returns the facts of all processes."""
        objects, log = self._objects, self._memory.log
        objects.faults.strike_outside(FaultPoint.FACTS)
        left, state = (
            read_left_state(self._memory.store, self._memory.host, self._memory.generation.number),
            self._carried.live.state,
        )
        committed = left.committed
        if committed is not None and state.condition is Condition.DENSE:
            committed = max(committed, state.step)  # a state that is there was committed
        process = dataclasses.replace(
            left,
            committed=committed,
            live=state,
            logs=() if log is None else log.extents(),
            is_new=self._carried.is_new,
            replica_id=self._replicas.name,
            holders=self._memory.plan.placement.holders[objects.rank],
            rng_equal_steps=range(0)
            if self._replicas.name is None
            else rng_equal_steps(self._memory.store),
        )
        own = Facts(
            generation=self._memory.generation.number,
            layout=objects.layout,
            ends=objects.ends,
            durable=durable.loadable,
            processes=tuple(
                within(each, self._carried.trusted)
                for each in (process, *self._memory.facts_of_spares())
            ),
        )
        facts = gather_facts(own, objects.device)
        newest = durable.newest(is_continuing=facts.is_continuing)
        return dataclasses.replace(facts, durable=newest)

    def _tell(self, plan: Plan, trained_again: int | None = None) -> None:
        """Reports a plan.

        Args:
            trained_again: committed steps after a tier that it begins with; None without one.
        """
        self._session.events.emit(
            EventName.PLAN,
            plan.target,
            verdict=plan.verdict.value,
            reason=plan.reason,
            target=plan.target,
            scope=sorted(plan.start_of),
            window=None if plan.window is None else plan.window.start,
            replayed_steps=plan.replayed_steps,
            lost_steps=plan.lost_steps if trained_again is None else trained_again,
            roll_forward=[str(one.rank) for one in plan.roll_forward],
            copies=[str(one.rank) for one in plan.copies],
            digest=plan.digest,
        )
        notices = self._session.notices
        tell = notices.warn if plan.loses_steps else notices.say
        tell(f"{plan.verdict.value}: {plan.reason}")
