# SPDX-License-Identifier: Apache-2.0
"""First captures: the digests of slots that a replay captures again, as holders have them.

A slot's record has a checksum for each of its parts, made when it was captured. Holders keep the
records of slots that a replay captures again.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.recovery.plan import Plan
from megatron_moevement.runtime.slots.mapped_file import checksum_of
from megatron_moevement.runtime.slots.slot_record import SlotRecord, record_document
from megatron_moevement.runtime.stores.store import StoreDirectory

FirstCaptures = Mapping[int, frozenset[str]]
"""For each step the digests of the records that anybody has of one rank's slot."""

OwnCaptures = Mapping[str, Mapping[Any, str]]
"""For each rank and step the digest of the record that one process has; as JSON."""


def record_digest(record: SlotRecord) -> str:
    """Returns what stands for a slot, wherever it lies: the checksums of all its parts."""
    document = record_document(record) | {"extent": None}
    return f"{checksum_of(json.dumps(document).encode()):016x}"


def captures_of(
    store: StoreDirectory,
    rollbacks: int,
    first_version: int,
    steps: Callable[[LogicalRank], range],
) -> OwnCaptures:
    """Returns what a process has of slots.

    Args:
        rollbacks: of the history that is meant.
        first_version: of the schedule with which its windows began.
        steps: returns the steps of a rank's slots that are meant.
    """
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for stored in store.rings():
        ring, meant = store.open_ring(stored.role, stored.owner), steps(stored.owner)
        for record in () if ring is None else ring.records():
            is_meant = record.rollbacks == rollbacks and record.step in meant
            if is_meant and record.window.schedule_version >= first_version:
                found[str(stored.owner)][record.step] = record_digest(record)
    return found


def own_captures(store: StoreDirectory, plan: Plan) -> OwnCaptures:
    """Returns what a process has of the slots that a plan captures again, before it does so."""
    first_version = plan.schedules.known.first_version
    return captures_of(
        store, plan.rollbacks, first_version, lambda owner: _captured_again(plan, owner)
    )


def captures_for(rank: LogicalRank, told: Iterable[OwnCaptures]) -> tuple[OwnCaptures, ...]:
    """Returns the part of documents that is of one rank."""
    name = str(rank)
    return tuple({name: document[name]} for document in told if name in document)


def first_captures(rank: LogicalRank, plan: Plan, told: Iterable[OwnCaptures]) -> FirstCaptures:
    """Returns what all processes have of the slots of a rank that a plan captures again.

    Args:
        told: what `own_captures` returns on all ranks, and what spares have.
    """
    found: dict[int, set[str]] = defaultdict(set)
    for document in told:
        for step, digest in document.get(str(rank), {}).items():
            if int(step) in _captured_again(plan, rank):
                found[int(step)].add(digest)
    return {step: frozenset(digests) for step, digests in found.items()}


def _captured_again(plan: Plan, owner: LogicalRank) -> range:
    return range(plan.start(owner.pp) + 1, plan.target + 1)
