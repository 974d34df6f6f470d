# SPDX-License-Identifier: Apache-2.0
"""Placement of holders: copies stay where they are, and only what was lost gets other holders."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from megatron_moevement.errors import UserError
from megatron_moevement.policy.copies.placement import HeldCopies, kept_placement
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.runtime.stores.store import RingRole, StoreDirectory
from megatron_moevement.strategies.moevement.protection.job_plan import JobPlan

HeldRanks = Sequence[Any]
"""A process, and the ranks whose slots it keeps, each with the step of the newest one; as JSON."""


def held_ranks(store: StoreDirectory, *roles: RingRole) -> dict[LogicalRank, int]:
    """Returns the ranks whose slots a store has for others, with the step of the newest one.

    Args:
        roles: which of its rings hold slots of others; those with copies where none are given.
    """
    meant = roles or (RingRole.HELD,)
    held: dict[LogicalRank, int] = {}
    for stored in store.rings():
        ring = store.open_ring(stored.role, stored.owner)
        records = () if ring is None or stored.role not in meant else ring.records()
        if records:
            held[stored.owner] = max(records[-1].step, held.get(stored.owner, 0))
    return held


def held_ranks_document(store: StoreDirectory, process: int) -> HeldRanks:
    """Returns what `held_ranks` does, of the store of a process."""
    return [process, [[str(rank), step] for rank, step in held_ranks(store).items()]]


def add_held(held: HeldCopies, document: HeldRanks) -> None:
    """Adds what a document of `held_ranks_document` says."""
    process, ranks = document
    for name, step in ranks:
        held.add(process, LogicalRank.parse(name), step)


def keep_placement(plan: JobPlan, held: HeldCopies) -> JobPlan:
    """Returns a plan that leaves copies with the processes that hold them, where there is room.

    Args:
        plan: agreed on by all ranks, with a placement made anew.
        held: what the stores of all ranks' processes hold; learns what those of spares do.
    """
    for spare in plan.spares:
        for rank, step in spare.held.items():
            held.add(spare.process, rank, step)
    placement = kept_placement(plan.placement, plan.hosts, held)
    carried = dataclasses.replace(plan, placement=placement)
    try:
        carried.check_limit(*(host.process for host in plan.hosts))
    except UserError:  # copies spread anew take less memory on the worst process
        return plan
    return carried
