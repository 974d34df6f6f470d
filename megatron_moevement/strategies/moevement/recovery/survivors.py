# SPDX-License-Identifier: Apache-2.0
"""Survivors: what a rank that keeps its state does in a recovery, before training goes on.

Order matters: who is a step behind applies it while its gradients are still there, and only then
everything is reset that an interrupted step leaves behind. What a replay had frozen is frozen until
then, so a step that rolls forward in it trains the operators that were active.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from megatron_moevement.integrations.megatron.optimizer import (
    GradientStatistics,
    UnlikeLedgerError,
)
from megatron_moevement.integrations.megatron.random_state import restore_random_state
from megatron_moevement.integrations.megatron.snapshots import LiveOperators
from megatron_moevement.integrations.megatron.step_commit import DecidedStep
from megatron_moevement.runtime.coordination.commit_barrier import DisagreementError
from megatron_moevement.runtime.coordination.ledger import LedgerEntry
from megatron_moevement.runtime.faults.fault_points import Strike
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.strategies.live_objects import LiveObjects
from megatron_moevement.strategies.moevement.carried_state import TORN, CarriedState, SurvivingState
from megatron_moevement.strategies.scalars import same_scalars


class Survivor:
    """The live objects of a rank that goes on from them; its training thread calls it."""

    def __init__(self, objects: LiveObjects, carried: CarriedState) -> None:
        """Names what has survived."""
        self._objects = objects
        self._carried = carried

    def roll_forward(self, entry: LedgerEntry, write_journal: Callable[[], None]) -> None:
        """Applies the step after the present one, whose gradients are finished; no collective.

        As in a commit the state is published once the journal has the step: the target of the next
        plan is what journals say. Nothing may interrupt it.

        Args:
            entry: what a rank that has committed the step wrote of it.
            write_journal: makes the journal say that the step is committed.

        Raises:
            DisagreementError: no gradients are finished here.
            UnlikeLedgerError: it did not come to the same.
        """
        standing, before = self._carried.live.without_finished().state, self._carried.scalars
        random_after = self._carried.live.random_after
        if random_after is None:
            raise DisagreementError(f"step {entry.step} has no finished gradients to be applied")
        self._carried.live = TORN
        statistics = GradientStatistics(found_inf=entry.found_inf, norm=entry.grad_norm)
        decided = DecidedStep(
            statistics,
            entry.loss,
            entry.num_tokens,
            before.random_state,
            entry.rng_equal,
            entry.popularity,
        )
        own, progress = self._objects.commit.apply(before.progress, decided, self._strike(entry))
        if not same_scalars(own, entry):
            raise UnlikeLedgerError(
                f"step {entry.step}, applied after a fault, differs from the ledger"
            )
        restore_random_state(dict(random_after))
        self._objects.faults.strike(entry.step, FaultPoint.LEDGER)
        write_journal()
        self._objects.faults.strike(entry.step, FaultPoint.COMMITTED)
        reached = dataclasses.replace(standing, step=entry.step)
        self._carried.live = SurvivingState(reached, self._objects.scalars(progress))

    def _strike(self, entry: LedgerEntry) -> Strike:
        """Returns what passes the fault points of a commit, and that of a roll-forward."""
        faults = self._objects.faults

        def strike(place: FaultPoint) -> None:
            faults.strike(entry.step, place)
            if place is FaultPoint.AFTER_OPTIMIZERS:
                faults.strike_outside(FaultPoint.ROLL_FORWARD)

        return strike

    def reset(self) -> None:
        """Makes everything look as between two steps; the finished gradients are gone."""
        if self._carried.live.scalars is not None:
            self._carried.live = self._carried.live.without_finished()
        self._objects.transients.reset()

    def stand_by(self, live: LiveOperators) -> None:
        """Puts back the scalars of the state and derives the compute weights from the masters.

        It makes collectives within the stage: all of its ranks have survived.
        """
        self._objects.restore(self._carried.scalars)
        live.complete()
