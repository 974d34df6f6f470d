# SPDX-License-Identifier: Apache-2.0
"""The ledger in a recovery: from who has all of it to every journal."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.recovery.plan import Plan
from megatron_moevement.runtime.coordination.ledger import LedgerEntry, loss_from_hex, loss_to_hex
from megatron_moevement.runtime.slots.journal import Journal
from megatron_moevement.strategies.moevement.protection.host_memory import HostMemory
from megatron_moevement.strategies.moevement.window_history import WindowHistory
from megatron_moevement.strategies.scalars import decode_entry

LedgerDocument = Mapping[str, Any]
"""What one rank sends to all, of entries and losses by their steps; as JSON."""


@dataclasses.dataclass(frozen=True)
class LeftLedger:
    """What a process that has all of it says of the steps up to the target.

    Attributes:
        entries: of the steps that anybody replays or applies.
        losses: of all steps.
    """

    entries: Mapping[int, bytes]
    losses: Mapping[int, float]

    def entry(self, step: int) -> LedgerEntry:
        """Returns the entry of a step."""
        return decode_entry(self.entries[step])

    @classmethod
    def of_document(cls, document: LedgerDocument) -> Self:
        """Returns the ledger of what `own_ledger` returned."""
        return cls(
            entries={int(step): text.encode() for step, text in document["entries"].items()},
            losses={int(step): loss_from_hex(text) for step, text in document["losses"].items()},
        )


def own_ledger(memory: HostMemory, plan: Plan) -> LedgerDocument | None:
    """Returns the ledger of the steps that are done again, and all losses, as JSON holds them.

    One rank speaks for processes that have none.

    Args:
        memory: of this process; its files are open.

    Returns:
        None where another rank has the ledger, or speaks for who has it.
    """
    first, source = plan.first_ledger_step, plan.ledger_source
    if memory.host.process != source:
        steps = range(first, plan.target + 1)
        return None if source is None else memory.ledger_of_spare(source, steps)
    journal = memory.journal
    first = max(first, journal.entries().start)
    return {
        "entries": {step: journal.entry(step).decode() for step in range(first, plan.target + 1)},
        "losses": {
            step: loss_to_hex(loss)
            for step, loss in journal.losses().items()
            if step <= plan.target
        },
    }


def write_journal(
    journal: Journal, history: WindowHistory, target: int, ledger: LeftLedger, rank: LogicalRank
) -> None:
    """Makes the journal of this process, which occupies a rank, say what the job knows.

    Args:
        history: that the job goes on with.
        target: the newest step of the plan that is carried out.
        ledger: of the steps up to it.
    """
    known = journal.state
    journal.keep_schedules(history.encoded)
    start = min(ledger.entries, default=target + 1) - 1
    journal.restore_losses(ledger.losses)
    if known is None or known.rollbacks != history.rollbacks:
        known = history.state(start, rank)
        journal.write_state(known)
    for step in range(max(known.committed, start) + 1, target + 1):
        state = history.state(step, rank)
        journal.commit(state, step, ledger.entries[step], ledger.losses.get(step))
    journal.write_state(history.state(target, rank))
