"""Settling: how a simulated process comes to the target of a plan, and writes its journal."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

from megatron_moevement.policy.copies.commit import newest_persisted
from megatron_moevement.policy.recovery.plan import Plan
from megatron_moevement.policy.recovery.rollforward import Settling
from megatron_moevement.policy.window.schedule import WindowSchedule
from megatron_moevement.testing.world.arithmetic import Entry
from megatron_moevement.testing.world.live import Live
from megatron_moevement.testing.world.process import Commands, Join, Pass, Process, Sleep, Wait
from megatron_moevement.testing.world.store import Store

if TYPE_CHECKING:
    from megatron_moevement.testing.world.world import World

RESET_TIME = 0.5


@dataclasses.dataclass(frozen=True)
class LeftLedger:
    """What the process that has all of it says of the steps up to the target."""

    entries: Mapping[int, Entry]
    losses: Mapping[int, int]


def settle(
    world: World,
    process: Process,
    plan: Plan,
    schedule: WindowSchedule,
    members: tuple[int, ...],
    *,
    loaded: Live | None,
) -> Commands:
    """Rolls forward or puts back what the interrupted step changed, and writes the journal.

    Windows go on under `schedule` from then on. What was `loaded`, if anything, is what the process
    replays from.
    """
    if process.store.rollbacks != plan.rollbacks:
        process.store = Store()  # of another history: its slots may have equal names
    yield Join(("opened",), members, process.number, None, len)
    ledger = yield from _share_ledger(process, plan, members)
    step = next((roll.step for roll in plan.roll_forward if roll.rank == process.rank), None)
    rank, process.capturing = process.rank, None
    for action in world.policies.settling:
        if action is Settling.ROLL_FORWARD and step is not None:
            yield from _roll_forward(world, process, plan, ledger, step)
        elif action is Settling.GIVE_UP and rank is not None and plan.gives_up(rank.pp):
            process.live = None
        elif action is Settling.RESET:
            process.run = None
            yield Sleep(RESET_TIME * (1 + 9 * world.random.random()))
        elif action is Settling.JOURNAL:
            process.schedule = schedule
            yield from _write_journal(world, process, plan, ledger)
        elif action is Settling.BELONG:
            process.is_new = process.is_new and process.rank is None
        elif action is Settling.TAKE_LOADED and loaded is not None:
            process.live = loaded


def _roll_forward(
    world: World, process: Process, plan: Plan, ledger: LeftLedger, step: int
) -> Commands:
    run, live = process.run, process.live
    if run is not None and live is not None and not live.torn and step == run.step:
        run.entry, run.plan = ledger.entries[step], plan
        yield from world.commits.execute(process, run, world.policies.roll_forward_section)


def _share_ledger(
    process: Process, plan: Plan, members: tuple[int, ...]
) -> Generator[Wait, Any, LeftLedger]:
    """Returns the ledger of the one who has it; nobody has written it down yet."""
    own = None
    if process.number == plan.ledger_source:
        own = LeftLedger(dict(process.store.ledger), dict(process.store.losses))

    def combine(said: dict[int, LeftLedger | None]) -> LeftLedger:
        return next((each for each in said.values() if each is not None), LeftLedger({}, {}))

    ledger: LeftLedger = yield Join(("ledger",), members, process.number, own, combine)
    return ledger


def _write_journal(world: World, process: Process, plan: Plan, ledger: LeftLedger) -> Commands:
    """Makes the journal say what the job knows, step by step."""
    store = process.store
    store.rollbacks = plan.rollbacks
    for step in range((store.committed or 0) + 1, plan.target + 1):
        yield Pass()
        if step in ledger.entries:
            store.ledger[step] = ledger.entries[step]
            store.losses[step] = ledger.losses[step]
        store.committed = step
    store.ledger.update(ledger.entries)
    store.losses.update(ledger.losses)
    store.committed = plan.target
    store.rank, store.schedule = process.rank, process.schedule
    if not plan.is_from_durable:
        store.persisted = newest_persisted(store.persisted, plan.persisted)
    if plan.window in {None, plan.persisted} and not plan.is_from_durable:
        world.commits.drop(process)
