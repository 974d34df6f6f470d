"""Invariants of stores without a process: used while they lead further, kept while needed."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from megatron_moevement.policy.recovery.plan import Plan
from megatron_moevement.testing.world.process import Process
from megatron_moevement.testing.world.recoverable import recoverable_step
from megatron_moevement.testing.world.store import Store
from megatron_moevement.testing.world.violations import require

if TYPE_CHECKING:
    from megatron_moevement.testing.world.world import World


class LeftInvariants:
    """Watches what dead processes left."""

    def __init__(self, world: World) -> None:
        """Watches a world from its start."""
        self._world = world
        self._begun: set[int] = set()

    def goes_back(self, plan: Plan) -> None:
        """7: a job goes back to what is durable only where no memory could bring it further."""
        if plan.generation in self._begun:
            return
        self._begun.add(plan.generation)
        live = self._world.live
        stores = [*(process.store for process in live), *self._world.machines.within_reach()]
        step = recoverable_step(stores, self._world.shape)
        there = [process.store.committed for process in live if not process.is_new]
        if any(committed is not None for committed in there):
            step = min(step or 0, max(committed or 0 for committed in there))
        further = step is not None and step > plan.target
        what = f"the job goes back to step {plan.target}, step {step} is in memory"
        require(not further, "7 recoverable", what)

    def forgets(self, process: Process, removed: Collection[Store]) -> None:
        """2: nothing is removed that could be needed."""
        world = self._world
        kept = [each.store for each in world.live]
        before = recoverable_step([*kept, *world.machines.stores], world.shape)
        others = [each for each in world.machines.stores if not any(each is one for one in removed)]
        after = recoverable_step([*kept, *others], world.shape)
        needed = before is not None and (after is None or after < before)
        require(not needed, "2 removed", process, "removes stores that lead to step", before)
