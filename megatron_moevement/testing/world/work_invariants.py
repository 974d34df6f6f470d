# SPDX-License-Identifier: Apache-2.0
"""Invariants of lost work: what memory still leads to is neither done again nor removed."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING

from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.recovery.plan import Plan
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.testing.world.process import Process
from megatron_moevement.testing.world.shape import Shape
from megatron_moevement.testing.world.simulated_store import Store
from megatron_moevement.testing.world.violations import require

if TYPE_CHECKING:
    from megatron_moevement.testing.world.world import World


@dataclasses.dataclass
class History:
    """What a history of training has come to.

    Attributes:
        steps: the newest step that each rank committed.
        window: the newest persisted window.
        domains: failure domains that keep each slot of it.
        since: the time from which a loss takes one of them.
    """

    steps: dict[LogicalRank, int] = dataclasses.field(default_factory=dict)
    window: Window | None = None
    domains: int = 0
    since: float = 0.0


class WorkInvariants:
    """Counts failure domains that are lost, and watches what becomes of what is in memory."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._lost: list[tuple[float, str]] = []
        self._voted: dict[LogicalRank, float] = {}
        self._histories: dict[int, History] = {}
        self._gone_back: set[int] = set()

    def lost(self, domain: str) -> None:
        """Notes that memory in a failure domain is lost, or no longer what it was."""
        self._lost.append((self._world.clock.now, domain))

    def votes(self, process: Process) -> None:
        """Notes when a rank says which of its slots have their copies."""
        self._voted[process.place] = self._world.clock.now

    def committed(self, process: Process) -> None:
        """Notes a step that a rank has committed."""
        rank, steps = process.place, self._history(process).steps
        steps[rank] = max(process.store.committed or 0, steps.get(rank, 0))

    def learnt(self, process: Process, copies: int) -> None:
        """Notes that a window is persisted, with so many copies of each slot besides the own."""
        history, window = self._history(process), process.store.persisted
        if history.window is None or (window is not None and history.window < window):
            history.window, history.domains = window, copies + 1
            history.since = min(self._voted.values())

    def restarts_windows(self, rollbacks: int) -> None:
        """Notes that the windows of a history are given up, and its states go on."""
        history = self._histories.setdefault(rollbacks, History())
        history.window = None

    def goes_back(self, plan: Plan) -> None:
        """Checks, once, a plan that goes back to what is durable."""
        if plan.generation not in self._gone_back:
            self._gone_back.add(plan.generation)
            self._domains_are_gone(plan)
            self._is_durable_newest(plan)

    def _domains_are_gone(self, plan: Plan) -> None:
        """7: a job that goes back loses no step while a domain keeps the persisted window."""
        history = self._histories[max(self._histories)] if self._histories else History()
        ranks = self._world.shape.layout.num_ranks
        if history.window is None or len(history.steps) < ranks:
            return
        gone = {domain for time, domain in self._lost if time >= history.since}
        step = min(history.steps.values())
        if not any((process.store.committed or 0) >= step for process in self._world.live):
            step -= 1  # nobody hears of a step before the next barrier but those that committed it
        what = f"the job goes back to step {plan.target} from {step}, lost are {sorted(gone)}"
        lost_work = plan.target < step and len(gone) < history.domains
        require(not lost_work, "7 lost work", what, "of", history.domains, "domains")

    def _is_durable_newest(self, plan: Plan) -> None:
        """7: a job goes back to what is durable only where no memory could bring it further."""
        live = self._world.live
        stores = [*(process.store for process in live), *self._world.machines.within_reach()]
        step = _recoverable_step(stores, self._world.shape)
        there = [process.store.committed for process in live if not process.is_new]
        if any(committed is not None for committed in there):
            step = min(step or 0, max(committed or 0 for committed in there))
        further = step is not None and step > plan.target
        what = f"the job goes back to step {plan.target}, step {step} is in memory"
        require(not further, "7 recoverable", what)

    def forgets(self, process: Process, removed: Collection[Store]) -> None:
        """2: nothing is removed that could be needed, as far as damage can be seen.

        Without a recovery nobody reads a slot, so one that is damaged counts as any other.
        """
        world = self._world
        kept = [each.store for each in world.live]
        before = _recoverable_step([*kept, *world.machines.stores], world.shape, unread=True)
        others = [each for each in world.machines.stores if not any(each is one for one in removed)]
        after = _recoverable_step([*kept, *others], world.shape, unread=True)
        needed = before is not None and (after is None or after < before)
        require(not needed, "2 removed", process, "removes stores that lead to step", before)

    def _history(self, process: Process) -> History:
        return self._histories.setdefault(process.store.rollbacks, History())


def _recoverable_step(
    stores: Collection[Store], shape: Shape, *, unread: bool = False
) -> int | None:
    """Returns the newest step of the newest history that can be replayed from some stores.

    It is the truth, and not what any decision says.

    Args:
        unread: whether damage to a slot is still unseen.
    """
    knowing = [store for store in stores if store.committed is not None]
    rollbacks = max((store.rollbacks for store in knowing), default=0)
    knowing = [store for store in knowing if store.rollbacks == rollbacks]
    committed = max((store.committed or 0 for store in knowing), default=0)
    persisted = max((store.persisted for store in knowing if store.persisted), default=None)
    if persisted is None or committed < persisted.last:
        return None
    there = {key for store in knowing for key, slot in store.slots.items() if slot.intact or unread}
    replayed = range(persisted.start + 1, committed + 1)
    has_ledger = any(all(step in store.ledger for step in replayed) for store in knowing)
    is_whole = there.issuperset(shape.slots_of(persisted))
    return committed if has_ledger and is_whole else None
