# SPDX-License-Identifier: Apache-2.0
"""Mends that can be taken out, to see that the explorer finds what they mend.

Each is replaced by what the program did before it, by name, in the process of a rank, before it
trains. Nothing in the program knows of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from megatron_moevement.integrations.megatron.freezing import Freezing
from megatron_moevement.integrations.megatron.optimizer import GradientStatistics
from megatron_moevement.integrations.megatron.random_state import restore_random_state
from megatron_moevement.integrations.megatron.step_commit import DecidedStep
from megatron_moevement.policy.copies.persistence import Acknowledgements
from megatron_moevement.policy.facts.facts import Facts
from megatron_moevement.policy.job.graph_start import first_layer
from megatron_moevement.policy.recovery import recovery_planner as policy
from megatron_moevement.policy.recovery.histories import of_newest_history
from megatron_moevement.policy.recovery.newest_state import Durable, is_memory_newest
from megatron_moevement.policy.recovery.plan import Plan
from megatron_moevement.runtime.coordination.ledger import LedgerEntry
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.strategies.moevement.carried_state import TORN, SurvivingState
from megatron_moevement.strategies.moevement.protection.left_state import (
    gather_facts,
    read_left_state,
)
from megatron_moevement.strategies.moevement.protection.resident_store import ResidentStore
from megatron_moevement.strategies.moevement.protection.slot_replicator import SlotReplicator
from megatron_moevement.strategies.moevement.recovery import planning as recovery
from megatron_moevement.strategies.moevement.recovery.survivors import Survivor
from tests.harness.explorer.mend import Mend


def begin_each_graph_alone() -> None:
    """Begins a rank's autograd graph where this rank trains something, whatever its peers do."""
    agree = Freezing._agree_within_stage  # noqa: SLF001

    def alone(self: Freezing) -> tuple[bool, int]:
        anywhere, _ = agree(self)
        return anywhere, first_layer(self.operators - self.frozen)

    _replace(Freezing, "_agree_within_stage", alone)


def give_up_failed_transfers() -> None:
    """Counts a holder no more to which one transfer has failed, unless another takes its place."""

    def give_up(self: SlotReplicator, silent: int) -> None:
        if not self._replace(silent):
            self._sender.account.update(lambda known: _without(known, silent))

    _replace(SlotReplicator, "_mend", give_up)


def _without(known: Acknowledgements, process: int) -> Acknowledgements:
    owing = {slot: processes - {process} for slot, processes in known.owing.items()}
    return dataclasses.replace(known, owing=owing)


def publish_before_journal() -> None:
    """Publishes a state that was rolled forward before the journal has it; journals alone count."""
    journals: list[int | None] = []

    def read_and_note(*args: Any) -> Any:
        left = read_left_state(*args)
        journals.append(left.committed)
        return left

    def gather_of_journals(own: Facts, device: Any) -> Facts:
        process, *spares = own.processes
        process = dataclasses.replace(process, committed=journals[-1])
        return gather_facts(dataclasses.replace(own, processes=(process, *spares)), device)

    _replace(recovery, "read_left_state", read_and_note)
    _replace(recovery, "gather_facts", gather_of_journals)
    _replace(policy, "check_nobody_is_ahead", lambda processes, target: None)
    _replace(Survivor, "roll_forward", _publish_at_once)


def _publish_at_once(self: Survivor, entry: LedgerEntry, write_journal: Callable[[], None]) -> None:
    """Rolls forward; who calls it writes the journal afterwards, once more."""
    del write_journal
    carried, objects = self._carried, self._objects
    before, random_after = self._carried.scalars, carried.live.random_after
    assert random_after is not None
    carried.live = TORN
    statistics = GradientStatistics(found_inf=entry.found_inf, norm=entry.grad_norm)
    decided = DecidedStep(
        statistics, entry.loss, entry.num_tokens, before.random_state, entry.rng_equal
    )
    _, progress = objects.commit.apply(before.progress, decided, self._strike(entry))
    restore_random_state(dict(random_after))
    carried.live = SurvivingState.dense(objects.scalars(progress))
    objects.faults.strike(entry.step, FaultPoint.LEDGER)


def begin_anew_in_silence() -> None:
    """Lets who comes in new find nothing of the dead, and a job that finds nothing begin anew."""
    opened = ResidentStore.open

    def open_without_the_dead(self: ResidentStore, *args: Any, **kwargs: Any) -> Any:
        root, identity, process, rank, *rest = args
        if kwargs["patience"] > timedelta(0):  # as in a restart in place
            rank = None
        return opened(self, root, identity, process, rank, *rest, **kwargs)

    def plan_or_none(facts: Facts) -> Plan | None:
        return policy.plan_recovery(facts) if is_memory_newest(of_newest_history(facts)) else None

    def loadable(self: Durable, *, is_continuing: bool) -> int:
        del is_continuing
        return self.loadable

    _replace(ResidentStore, "open", open_without_the_dead)
    _replace(ResidentStore, "take_in", lambda self, rank, ranks: ())
    _replace(recovery, "plan_start", plan_or_none)
    _replace(Durable, "newest", loadable)


WITHOUT: Mapping[Mend, Callable[[], None]] = {
    Mend.GRAPH_START: begin_each_graph_alone,
    Mend.TRANSFER_RETRIES: give_up_failed_transfers,
    Mend.JOURNAL_FIRST: publish_before_journal,
    Mend.ADOPTION_IN_PLACE: begin_anew_in_silence,
}
"""What takes each of them out."""


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    if not hasattr(owner, name):
        raise AttributeError(f"{owner} has no {name}: what is replaced has another name now")
    setattr(owner, name, function)
