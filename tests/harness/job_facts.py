# SPDX-License-Identifier: Apache-2.0
"""Job facts: what the processes of a job publish after a fault, as the protocol leaves it behind.

A `Job` says how a job stands when it is interrupted; the functions take processes, logs and slots
away from it, or bring an interrupted recovery on. Nothing here decides anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from functools import cached_property
from itertools import count

from megatron_moevement.policy.copies.placement import Host, Placement, place_replicas
from megatron_moevement.policy.facts.facts import (
    Condition,
    Facts,
    Holding,
    LiveState,
    LogExtent,
    ProcessFacts,
)
from megatron_moevement.policy.job.boundary import Direction
from megatron_moevement.policy.job.ranks import Layout, LogicalRank
from megatron_moevement.policy.job.segments import Ends, receivers_from
from megatron_moevement.policy.recovery.plan import Origin, Plan
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.policy.window.timetable import Timetable
from megatron_moevement.testing.world.restarts import assign_spares
from tests.harness.one_schedule import one_schedule


@dataclasses.dataclass(frozen=True)
class Job:
    """A job in training, at the moment of an interrupt.

    Attributes:
        layout: its sizes.
        step: T, the newest step that any of its ranks has committed.
        window: W; windows start at its multiples.
        lag: L, steps from a window's last capture to the one at which it is persisted, at least 1.
        ends: how the first and last stage hang together.
        replicas: r.
        spares: processes without a rank, numbered after those that have one.
        processes_per_domain: how many processes of consecutive numbers are lost together.
        behind: ranks that have finished the gradients of T and not applied them.
        ahead: ranks that have finished the gradients of T + 1, which nobody has committed.
        durable: step of the newest durable checkpoint.
    """

    layout: Layout
    step: int
    window: int = 3
    lag: int = 1
    ends: Ends = Ends.INDEPENDENT
    replicas: int = 2
    spares: int = 2
    processes_per_domain: int = 1
    behind: frozenset[LogicalRank] = frozenset()
    ahead: frozenset[LogicalRank] = frozenset()
    durable: int = 0

    @cached_property
    def hosts(self) -> tuple[Host, ...]:
        """All processes: rank n of Megatron is process n, the spares follow."""
        ranks = (*self.layout.ranks, *(None for _ in range(self.spares)))
        return tuple(
            Host(process, f"node{process // self.processes_per_domain}", rank)
            for process, rank in enumerate(ranks)
        )

    @cached_property
    def placement(self) -> Placement:
        """Who keeps copies of whose slots."""
        return place_replicas(self.hosts, self.replicas)

    @cached_property
    def timetable(self) -> Timetable:
        """The one schedule that the job has had."""
        return one_schedule(self.window)

    def persisted_at(self, step: int) -> Window | None:
        """Returns the window that a rank which committed `step` knows to be persisted."""
        windows = (step - self.lag + 1) // self.window
        return Window((windows - 1) * self.window, self.window) if windows > 0 else None

    def holdings_at(self, owner: LogicalRank, step: int, landed: int) -> tuple[Holding, ...]:
        """Returns what a process keeps of a rank's slots: no garbage, and what has landed.

        Args:
            owner: the rank.
            step: what the process has committed.
            landed: k of the first S_k whose slot has not landed.
        """
        persisted = self.persisted_at(step)
        first = 0 if persisted is None else persisted.start
        windows = [Window(start, self.window) for start in range(first, landed, self.window)]
        return tuple(
            Holding(owner, window, (1 << min(landed - window.start, self.window)) - 1)
            for window in windows
        )

    def facts(self, generation: int = 1) -> Facts:
        """Returns what the processes publish while nobody is lost."""
        kept: dict[int, list[LogicalRank]] = {host.process: [] for host in self.hosts}
        for owner, holders in self.placement.holders.items():
            for process in holders:
                kept[process].append(owner)
        processes = tuple(self._publish(host, kept[host.process]) for host in self.hosts)
        return Facts(generation, self.layout, self.ends, self.durable, processes)

    def _publish(self, host: Host, others: list[LogicalRank]) -> ProcessFacts:
        rank = host.rank
        if rank is None:
            holdings = tuple(
                each for owner in others for each in self.holdings_at(owner, self.step, self.step)
            )
            live = LiveState(Condition.ABSENT)
            return ProcessFacts(host.process, host.domain, None, None, live, holdings=holdings)
        step = self.step - (rank in self.behind)
        finished = step + 1 if rank in self.behind | self.ahead else None
        persisted = self.persisted_at(step)
        first = 1 if persisted is None else persisted.start + 1
        # the optimizer of a step waits for the copy of the state before it
        complete = step if finished is None else finished
        logged = frozenset(range(first, complete + 1))
        return ProcessFacts(
            process=host.process,
            domain=host.domain,
            rank=rank,
            committed=step,
            live=LiveState(Condition.DENSE, step, finished=finished),
            persisted=persisted,
            holdings=tuple(
                each
                for owner in (rank, *others)
                for each in self.holdings_at(owner, step, complete)
            ),
            logs=tuple(LogExtent(way, logged) for way in sent_ways(self.layout, rank.pp)),
            ledger=range(first, step + 1),
            timetable=self.timetable,
            holders=self.placement.holders[rank],
        )


def sent_ways(layout: Layout, stage: int) -> tuple[Direction, ...]:
    """Returns the directions in which a stage sends."""
    return tuple(direction for direction, _ in receivers_from(layout, stage))


def changed(facts: Facts, changes: Mapping[int, ProcessFacts]) -> Facts:
    """Returns the facts with what some processes publish exchanged, by their number."""
    processes = tuple(changes.get(each.process, each) for each in facts.processes)
    return dataclasses.replace(facts, processes=processes)


def without_processes(facts: Facts, lost: Collection[int]) -> Facts:
    """Returns the facts of the next generation: spares have taken the ranks of lost processes.

    Where there are too few, new processes take the other ranks, as after another launch.
    """
    left = [each for each in facts.processes if each.process not in lost]
    vacant = {
        each.rank: each.domain
        for each in facts.processes
        if each.process in lost and each.rank is not None
    }
    hosts = [Host(each.process, each.domain, each.rank) for each in left]
    taken = {process: rank for rank, process in assign_spares(hosts, vacant).items()}
    processes = tuple(
        dataclasses.replace(each, rank=taken.get(each.process, each.rank)) for each in left
    )
    numbers = count(max((each.process for each in facts.processes), default=-1) + 1)
    live = LiveState(Condition.ABSENT)
    new = tuple(
        ProcessFacts(number, f"new{number}", rank, None, live, is_new=True)
        for rank, number in zip(sorted(vacant.keys() - set(taken.values())), numbers, strict=False)
    )
    generation = facts.generation + 1
    return dataclasses.replace(facts, generation=generation, processes=(*processes, *new))


def with_replicas(facts: Facts) -> Facts:
    """Returns the facts of a job whose ranks hold what they train whole, with streams alike.

    Call it last: a process that has taken a rank holds what that rank does.
    """
    layout = facts.layout
    changes = {
        each.process: dataclasses.replace(
            each,
            replica_id=f"pp{each.rank.pp}.tp{each.rank.tp}.ep{layout.expert_parallel_rank(each.rank)}",
            rng_equal_steps=each.ledger,
        )
        for each in facts.processes
        if each.rank is not None
    }
    return changed(facts, changes)


def without_commit(facts: Facts, torn: Collection[int]) -> Facts:
    """Returns the facts where an error has left the commit of some processes torn."""
    changes = {
        each.process: dataclasses.replace(each, live=LiveState(Condition.TORN, each.live.step))
        for each in facts.processes
        if each.process in torn and each.rank is not None
    }
    return changed(facts, changes)


def without_log_steps(facts: Facts, process: int, steps: Collection[int]) -> Facts:
    """Returns the facts where a process's logs of some steps have wrong checksums."""
    each = next(each for each in facts.processes if each.process == process)
    logs = tuple(LogExtent(log.direction, log.steps - frozenset(steps)) for log in each.logs)
    return changed(facts, {process: dataclasses.replace(each, logs=logs)})


def without_slots(facts: Facts, process: int, owner: LogicalRank, slots: int) -> Facts:
    """Returns the facts where some slots of a rank, as bits, have wrong checksums on a process."""
    each = next(each for each in facts.processes if each.process == process)
    holdings = tuple(
        dataclasses.replace(holding, slots=holding.slots & ~slots)
        if holding.owner == owner
        else holding
        for holding in each.holdings
    )
    return changed(facts, {process: dataclasses.replace(each, holdings=holdings)})


@dataclasses.dataclass(frozen=True)
class Interrupt:
    """How far the ranks were with a plan that replays when it was interrupted.

    Attributes:
        reached: for each stage in scope k of the S_k that its ranks reached.
        behind: ranks that have finished the gradients of that step and not applied them.
        waiting: ranks that have fetched nothing yet and hold what they held before the plan.
    """

    reached: Mapping[int, int]
    behind: frozenset[LogicalRank] = frozenset()
    waiting: frozenset[LogicalRank] = frozenset()


def interrupted(facts: Facts, plan: Plan, interrupt: Interrupt) -> Facts:
    """Returns the facts of the next generation when the execution of a plan was cut."""
    processes = tuple(_settled(each, plan) for each in facts.processes)
    processes = tuple(
        _replaying(each, facts.layout, plan, interrupt)
        if each.rank is not None and each.rank.pp in plan.start_of
        else each
        for each in processes
    )
    return dataclasses.replace(facts, generation=facts.generation + 1, processes=processes)


def _settled(facts: ProcessFacts, plan: Plan) -> ProcessFacts:
    """Returns what a process publishes once it has rolled forward and reset its transients."""
    live = facts.live
    step = next((roll.step for roll in plan.roll_forward if roll.rank == facts.rank), live.step)
    window = live.window if live.window is not None and live.window.last >= step else None
    if live.condition is Condition.PARTIAL and window is None:
        live = LiveState(Condition.DENSE, step)
    else:
        live = dataclasses.replace(live, step=step, finished=None)
    known = facts.committed is not None
    has_last = step == plan.target and live.condition is not Condition.ABSENT
    logs = (LogExtent(log.direction, _until(log.steps, plan.target)) for log in facts.logs)
    return dataclasses.replace(
        facts,
        committed=plan.target if known else None,
        timetable=plan.schedules.timetable if known else None,
        live=live,
        persisted=plan.persisted,
        logs=tuple(logs),
        ledger=range(facts.ledger.start, plan.target + 1) if has_last else facts.ledger,
    )


def _until(steps: frozenset[int], last: int) -> frozenset[int]:
    return frozenset(step for step in steps if step <= last)


def _replaying(
    facts: ProcessFacts, layout: Layout, plan: Plan, interrupt: Interrupt
) -> ProcessFacts:
    """Returns what a rank publishes that was cut while it replayed."""
    rank, window = facts.rank, plan.window
    assert rank is not None
    assert window is not None
    if rank in interrupt.waiting:
        return facts
    start, step = plan.start(rank.pp), interrupt.reached[rank.pp]
    lags = rank in interrupt.behind and step > start
    origin = next(replay.origin for replay in plan.replays if replay.stage == rank.pp)
    own = step - lags
    live = LiveState(Condition.DENSE, own, finished=step if lags else None)
    converts = origin is Origin.WINDOW or facts.live.window == window
    if converts and own < window.last:
        live = dataclasses.replace(live, condition=Condition.PARTIAL, window=window)
    logged = {log.direction: log.steps for log in facts.logs}
    again = frozenset(range(start + 1, step + 1))
    ways = sent_ways(layout, rank.pp)
    holdings = facts.holdings
    for fetch in plan.fetches_of(rank):
        holdings = _with_slots(holdings, rank, fetch.slot.window, {fetch.slot.slot})
    persisted = window if plan.persisted is None else plan.persisted
    for again_from in range(persisted.last + 1, step, window.size):
        captured = Window(again_from, window.size, window.schedule_version)
        slots = {k - again_from for k in range(start, step) if again_from <= k <= captured.last}
        holdings = _with_slots(holdings, rank, captured, slots)
    return dataclasses.replace(
        facts,
        committed=plan.target,
        timetable=plan.schedules.timetable,
        live=live,
        holdings=holdings,
        logs=tuple(LogExtent(way, logged.get(way, frozenset()) | again) for way in ways),
        ledger=range(min(start, window.start) + 1, plan.target + 1),
    )


def _with_slots(
    holdings: tuple[Holding, ...], owner: LogicalRank, window: Window, slots: Collection[int]
) -> tuple[Holding, ...]:
    """Returns holdings with more slots of a rank's window."""
    former = next(
        (each for each in holdings if (each.owner, each.window) == (owner, window)),
        Holding(owner, window, 0),
    )
    more = sum(1 << slot for slot in slots)
    rest = tuple(each for each in holdings if each is not former)
    return (dataclasses.replace(former, slots=former.slots | more), *rest) if more else holdings
