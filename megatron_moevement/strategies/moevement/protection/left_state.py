# SPDX-License-Identifier: Apache-2.0
"""Left state: what a former launch of the job left in a process's memory, as facts."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import torch

from megatron_moevement.policy.copies.placement import Host
from megatron_moevement.policy.facts.facts import Condition, Facts, Holding, LiveState, ProcessFacts
from megatron_moevement.policy.facts.facts_document import ProcessReader, dump_process
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.coordination.agreement import gather_read
from megatron_moevement.runtime.slots.journal import JournalState
from megatron_moevement.runtime.stores.store import StoreDirectory
from megatron_moevement.strategies.scalars import decode_entry


def read_left_state(store: StoreDirectory, host: Host, generation: int) -> ProcessFacts:
    """Returns what a process finds in its store; a new process finds nothing.

    A launch reads every slot once: one with a wrong checksum does not count. In a restart all wait
    for it, so a slot with an intact descriptor counts unread: it was hashed when it was captured or
    arrived, and is again when it is loaded or served. One that is found damaged then ends the
    generation, and the next one reads what lies beside it, as after one that a background check
    has found; a launch might have no next one.

    Args:
        generation: in-process restarts of this launch.

    Raises:
        UserError: the store is another job's.
    """
    journal = store.open_journal()
    state = None if journal is None else journal.state
    facts = ProcessFacts(
        process=host.process,
        domain=host.domain,
        rank=host.rank,
        committed=None,
        live=LiveState(Condition.ABSENT),
    )
    if journal is None or state is None:
        return facts
    return dataclasses.replace(
        facts,
        committed=state.committed,
        persisted=state.persisted,
        holdings=_holdings(store, state, generation),
        ledger=journal.entries(),
        rollbacks=state.rollbacks,
        # What is not there in whole is known to others.
        timetable=state.timetable
        if journal.schedules().keys() >= state.timetable.digests()
        else None,
    )


def rng_equal_steps(store: StoreDirectory) -> range:
    """Returns the newest steps of the ledger in a row behind which replicas had equal streams."""
    journal = store.open_journal()
    if journal is None:
        return range(0)
    entries = journal.entries()
    first = entries.stop
    while first > entries.start and decode_entry(journal.entry(first - 1)).rng_equal:
        first -= 1
    return range(first, entries.stop)


def _holdings(store: StoreDirectory, state: JournalState, generation: int) -> tuple[Holding, ...]:
    """Returns the slots that count and are not from before a rollback."""
    slots: dict[tuple[LogicalRank, Window], int] = defaultdict(int)
    for stored in store.rings():
        ring = store.open_ring(stored.role, stored.owner)
        if ring is None:
            continue
        is_read = generation == 0 or ring.is_doubted
        for record in ring.records():
            if record.rollbacks != state.rollbacks or ring.was_damaged(record):
                continue
            if not (is_read and ring.damaged_parts(record)):
                slots[stored.owner, record.window] |= 1 << record.slot
        ring.is_doubted = False  # what was found is known by now
    return tuple(Holding(owner, window, held) for (owner, window), held in sorted(slots.items()))


def gather_facts(own: Facts, device: torch.device) -> Facts:
    """Returns the facts of all processes; every rank calls it with its own.

    Args:
        own: with this process alone.
    """
    reader = ProcessReader()
    read: list[ProcessFacts] = []
    gather_read(
        [dump_process(each) for each in own.processes],
        device,
        lambda rank, told: read.extend(reader.load(told, f"what rank {rank} said")),
    )
    return dataclasses.replace(own, processes=tuple(read))
