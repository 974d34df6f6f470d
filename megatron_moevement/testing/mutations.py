# SPDX-License-Identifier: Apache-2.0
"""Mutations: one wrong decision each, which the simulator must notice.

Production code knows nothing of them: a mutation exchanges one policy for a wrong one. Those of
`OF_THE_MODEL` exchange what only the model has, to show that a check of it can fail; each of the
others breaks a decision that production takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from megatron_moevement.policy.copies.peer_trouble import Remedy
from megatron_moevement.policy.copies.retention import Retention, retain
from megatron_moevement.policy.copies.slot_ring import Extent
from megatron_moevement.policy.facts.facts import Condition, Facts, LiveState, ProcessFacts
from megatron_moevement.policy.job.operators import OperatorId
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.recovery import recovery_planner as recovery
from megatron_moevement.policy.recovery.plan import Plan, Schedules, WindowEdges
from megatron_moevement.policy.window.schedule import Window, WindowSchedule
from megatron_moevement.policy.window.timetable import Timetable
from megatron_moevement.testing.world.policies import Policies, adopts
from megatron_moevement.testing.world.scheduling import Proposed
from megatron_moevement.testing.world.step_model import (
    ROLL_FORWARD_SECTION,
    Command,
    Section,
)
from megatron_moevement.testing.world.tokens import Counts
from megatron_moevement.testing.wrong_acknowledgements import CopiesUncounted, DamageOverlooked
from megatron_moevement.testing.wrong_places import as_it_lay, over_what_stays, same_domain


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A wrong decision.

    Attributes:
        name: for the command line.
        what: what is wrong.
        policies: the decisions with the wrong one among them.
    """

    name: str
    what: str
    policies: Policies


def _slots_of_replica(
    schedule: WindowSchedule, rank: LogicalRank, slot: int
) -> tuple[frozenset[OperatorId], frozenset[OperatorId]]:
    own = frozenset(operator.id for operator in schedule.inventory.by_rank[rank])
    shift = rank.dp % schedule.window
    slots = {operator: (schedule.slots[operator] + shift) % schedule.window for operator in own}
    return (
        frozenset(operator for operator in own if slots[operator] == slot),
        frozenset(operator for operator in own if slots[operator] > slot),
    )


def _adopted_an_edge_early(
    timetable: Timetable, proposed: Proposed, step: int, rank: LogicalRank
) -> Timetable:
    early = max(step - timetable.newest.window, timetable.newest.first_step)
    is_odd = rank.pp == rank.dp == rank.ep == 0
    return adopts(timetable, proposed, early if is_odd else step, rank)


def _own_counts(told: Mapping[LogicalRank, Counts | None], rank: LogicalRank) -> Counts | None:
    return told[rank]


def _retain_fewer_logs(persisted: Window | None, first_step: int) -> Retention:
    kept = retain(persisted, first_step)
    return dataclasses.replace(kept, oldest_log_step=kept.oldest_log_step + 1)


def _with_facts(change: Callable[[Facts], Facts]) -> Policies:
    """Returns the policies of a planner that is given other facts."""
    return Policies(plan_start=lambda facts: recovery.plan_start(change(facts)))


def _of_each(change: Callable[[ProcessFacts], ProcessFacts]) -> Policies:
    """Returns the policies of a planner that is given other facts of each process."""
    return _with_facts(lambda facts: _changed(facts, change))


def _changed(facts: Facts, change: Callable[[ProcessFacts], ProcessFacts]) -> Facts:
    return dataclasses.replace(facts, processes=tuple(map(change, facts.processes)))


def _with_plan(change: Callable[[Facts, Plan], Plan]) -> Policies:
    """Returns the policies of a planner whose plans are changed."""

    def plan_start(facts: Facts) -> Plan | None:
        plan = recovery.plan_start(facts)
        return None if plan is None else change(facts, plan)

    return Policies(plan_start=plan_start)


def _newest_captured_is_persisted(facts: Facts) -> Facts:
    windows = (holding.window for process in facts.processes for holding in process.holdings)
    captured = max(windows, default=None)
    return _changed(facts, lambda process: dataclasses.replace(process, persisted=captured))


def _target_is_minimum(facts: Facts) -> Facts:
    known = [each.committed for each in facts.processes if each.committed is not None]
    oldest = min(known, default=0)

    def at_oldest(process: ProcessFacts) -> ProcessFacts:
        live = process.live
        if process.committed is None:
            return process
        if live.condition is Condition.DENSE:
            live = dataclasses.replace(live, step=min(live.step, oldest))
        return dataclasses.replace(process, committed=oldest, live=live)

    return _changed(facts, at_oldest)


def _window_edge_moved(_: Facts, plan: Plan) -> Plan:
    if plan.edges is WindowEdges.RESTARTED:
        return plan
    timetable, source = plan.schedules
    if timetable is None or timetable.newest.window == 1:
        return plan
    newest = timetable.newest
    first_step = newest.first_step - 1 if newest.first_step else newest.window - 1
    moved = dataclasses.replace(timetable, entries=(newest._replace(first_step=first_step),))
    return dataclasses.replace(plan, schedules=Schedules(moved, source))


def _forget_ledger_of_first_window(facts: Facts) -> Facts:
    if any(process.persisted is not None for process in facts.processes):
        return facts
    return _changed(facts, lambda process: dataclasses.replace(process, ledger=range(0)))


def _forget_intermediate(process: ProcessFacts) -> ProcessFacts:
    if process.live.step == process.committed:
        return process
    return dataclasses.replace(process, live=LiveState(Condition.ABSENT))


def _copy_before_roll_forward(facts: Facts, plan: Plan) -> Plan:
    sources = {copy.source for copy in plan.copies}
    behind = {process.rank for process in facts.processes if process.process in sources}
    rolling = tuple(roll for roll in plan.roll_forward if roll.rank not in behind)
    return dataclasses.replace(plan, roll_forward=rolling)


def _all_experts_are_the_same(process: ProcessFacts) -> ProcessFacts:
    if process.replica_id is None or process.rank is None:
        return process
    return dataclasses.replace(process, replica_id=f"stage {process.rank.pp}")


def _trust_torn(process: ProcessFacts) -> ProcessFacts:
    if process.live.condition is not Condition.TORN:
        return process
    return dataclasses.replace(process, live=LiveState(Condition.DENSE, process.live.step))


def _logs_cover_everything(process: ProcessFacts) -> ProcessFacts:
    everything = frozenset(range(1_000))
    logs = tuple(dataclasses.replace(log, steps=everything) for log in process.logs)
    return dataclasses.replace(process, logs=logs)


def _ignore_what_new_ones_found(process: ProcessFacts) -> ProcessFacts:
    if not process.is_new:
        return process
    return dataclasses.replace(
        process, committed=None, persisted=None, holdings=(), ledger=range(0)
    )


def _retain_last_window(persisted: Window | None, first_step: int) -> Retention:
    kept = retain(persisted, first_step)
    if persisted is None:
        return kept
    return dataclasses.replace(kept, oldest_slot_step=persisted.start + 1)


def _without(command: Command) -> tuple[Command, ...]:
    return tuple(each for each in Command if each is not command)


_RECORD = {Section.LEDGER, Section.COMMITTED}

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "slot-differs-between-replicas",
        "each replica spreads its operators over the window in its own way",
        Policies(slot_contents=_slots_of_replica),
    ),
    Mutation(
        "schedule-adopted-early",
        "one rank goes by another schedule an edge before all others",
        Policies(adopts=_adopted_an_edge_early),
    ),
    Mutation(
        "order-not-reduced",
        "a rank orders experts by the tokens that it has counted itself",
        Policies(reduced_counts=_own_counts),
    ),
    Mutation(
        "window-by-own-link",
        "a rank chooses W from its own measurements alone",
        Policies(heard=lambda own, greatest: own),
    ),
    Mutation(
        "spares-not-foreseen",
        "the memory of a job is foreseen as if spares kept no copies",
        Policies(waiting=lambda cluster, ranks: ()),
    ),
    Mutation(
        "window-read-by-another-schedule",
        "a window is replayed by the schedule in force, not by the one that it was captured under",
        Policies(schedule_of=lambda timetable, window: timetable.newest),
    ),
    Mutation(
        "persisted-for-the-first",
        "a window counts as persisted when one rank's slots are acknowledged",
        Policies(
            coverage_vote=lambda window_start, copies: (window_start, -copies),
            agreed_coverage=lambda greatest: (greatest[0], -greatest[1]),
        ),
    ),
    Mutation(
        "complete-without-copies",
        "a slot counts as complete where nobody can be made to keep a copy",
        Policies(acknowledgements=CopiesUncounted),
    ),
    Mutation(
        "failed-transfer-given-up",
        "a holder to which one transfer has failed gets nothing for the rest of the generation",
        Policies(remedy=lambda trouble, now: Remedy.WAIT),
    ),
    Mutation(
        "damaged-slot-overlooked",
        "a rank trains on although its own slot was damaged before its copies were made",
        Policies(acknowledgements=DamageOverlooked),
    ),
    Mutation(
        "adopted-at-launch-only",
        "a process that opens its store after a restart does not look at what the dead left",
        Policies(adopts_in=lambda generation, *, is_refused: generation == 0),
    ),
    Mutation(
        "found-memory-ignored",
        "what only new processes hold counts as nothing",
        _of_each(_ignore_what_new_ones_found),
    ),
    Mutation(
        "log-dropped-early",
        "the oldest step that the persisted window needs is dropped from the logs",
        Policies(retain=_retain_fewer_logs),
    ),
    Mutation(
        "unpersisted-window",
        "the newest window of which any slot is held is replayed from",
        _with_facts(_newest_captured_is_persisted),
    ),
    Mutation(
        "window-edge-moved",
        "the windows after a recovery begin a step earlier than those before",
        _with_plan(_window_edge_moved),
    ),
    Mutation(
        "no-commit-barrier",
        "a rank votes and does not wait for the others before it commits",
        Policies(votes_suffice=lambda came, members: came <= members),
    ),
    Mutation(
        "target-is-minimum",
        "everybody goes back to the oldest step that a survivor committed last",
        _with_facts(_target_is_minimum),
    ),
    Mutation(
        "intermediate-state-lost",
        "a stage whose replay was interrupted begins it again",
        _of_each(_forget_intermediate),
    ),
    Mutation(
        "roll-forward-skipped",
        "survivors at T - 1 stay there",
        _with_plan(lambda facts, plan: dataclasses.replace(plan, roll_forward=())),
    ),
    Mutation(
        "rolled-forward-unrecorded",
        "a survivor publishes the state that it rolled forward to before its journal has the step",
        Policies(
            roll_forward_section=tuple(
                command for command in ROLL_FORWARD_SECTION if command not in _RECORD
            )
        ),
    ),
    Mutation(
        "copied-before-roll-forward",
        "a lost state is copied from a replica that is a step behind",
        _with_plan(_copy_before_roll_forward),
    ),
    Mutation(
        "copied-from-other-experts",
        "a lost state is copied from a rank with other experts",
        _of_each(_all_experts_are_the_same),
    ),
    Mutation(
        "epoch-not-checked",
        "messages of an older generation are taken",
        Policies(is_current=lambda sent_in, generation: True),
    ),
    Mutation(
        "torn-commit-trusted",
        "a state whose commit was cut counts as whole",
        _of_each(_trust_torn),
    ),
    Mutation(
        "first-window-done-again",
        "a fault before a window is persisted costs the steps since the job began",
        _with_facts(_forget_ledger_of_first_window),
    ),
    Mutation(
        "log-gaps-ignored",
        "a neighbour whose log does not reach back stays a bystander",
        _of_each(_logs_cover_everything),
    ),
    Mutation(
        "eras-mixed",
        "what lies before a rollback is mixed with what it began",
        _of_each(lambda process: dataclasses.replace(process, rollbacks=0)),
    ),
    Mutation(
        "first-slot-dropped",
        "the first slot of the persisted window is dropped with its predecessors",
        Policies(retain=_retain_last_window),
    ),
    Mutation(
        "copies-in-one-domain",
        "copies are placed without regard to failure domains",
        Policies(place_replicas=same_domain),
    ),
    Mutation(
        "capture-not-awaited",
        "the optimizer does not wait for the copy of the former state",
        Policies(training_step=_without(Command.AWAIT_CAPTURE)),
    ),
    Mutation(
        "log-not-awaited",
        "a rank votes before its upstream log has landed",
        Policies(training_step=_without(Command.AWAIT_LOG)),
    ),
    Mutation(
        "room-not-awaited",
        "a rank votes although its ring has no room for the slot",
        Policies(may_vote=lambda *_: True),
    ),
    Mutation(
        "slot-over-the-former",
        "a slot is written where the one before it lies",
        Policies(extent_of=lambda step, size_bytes, *_: Extent(0, size_bytes)),
    ),
    Mutation(
        "fetched-as-it-lay",
        "a fetched slot lies as it lay, whatever the slots next to it do",
        Policies(place_of=as_it_lay),
    ),
    Mutation(
        "copy-over-what-stays",
        "a copy lies where it lies in its owner's ring, over one that its owner relies on",
        Policies(moved_together=over_what_stays),
    ),
)

OF_THE_MODEL = {
    "slot-differs-between-replicas": "`1 slots`, `2b same slot`; in production one schedule holds",
    "schedule-adopted-early": "`2b same slot`; in production `Timetable.adopted` is called",
    "order-not-reduced": "`2b same counts`; in production the reduction is a collective",
    "window-by-own-link": "`2b worst rank`; in production the barrier's reduction is a collective",
    "no-commit-barrier": "`2 persisted`; in production the barrier is a collective",
    "rolled-forward-unrecorded": "`4 recorded`",
    "capture-not-awaited": "`6 same bits` of a slot whose state is overwritten",
    "log-not-awaited": "`3 logs`",
}
"""Mutations of the simulated step, and which check each shows to be able to fail."""


def mutation_named(name: str) -> Mutation:
    """Returns a mutation by its name.

    Raises:
        KeyError: there is none of that name.
    """
    return {mutation.name: mutation for mutation in MUTATIONS}[name]
