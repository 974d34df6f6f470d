"""Placement of holders: copies stay where they are, and only what was lost gets other holders."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from megatron_moevement.errors import UserError
from megatron_moevement.policy.copies.placement import kept_placement
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.runtime.stores.store import RingRole, StoreDirectory
from megatron_moevement.strategies.moevement.protection.job_plan import JobPlan

HeldRanks = Sequence[Any]
"""A process, and the ranks whose slots it keeps, each with the step of the newest one; as JSON."""

HeldCopy = tuple[int, LogicalRank, int]
"""A process, a rank whose slots it keeps, and the step of the newest one."""


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


def held_copies(document: HeldRanks) -> Iterator[HeldCopy]:
    """Yields what a document of `held_ranks_document` says."""
    process, ranks = document
    for name, step in ranks:
        yield process, LogicalRank.parse(name), step


def keep_placement(plan: JobPlan, held: Iterable[HeldCopy]) -> JobPlan:
    """Returns a plan that leaves copies with the processes that hold them, where there is room.

    Args:
        plan: agreed on by all ranks, with a placement made anew.
        held: what the stores of all ranks' processes hold.
    """
    of_spares = ((spare.process, *one) for spare in plan.spares for one in spare.held.items())
    placement = kept_placement(plan.placement, plan.hosts, chain(held, of_spares))
    carried = dataclasses.replace(plan, placement=placement)
    try:
        carried.check_limit(*(host.process for host in plan.hosts))
    except UserError:  # copies spread anew take less memory on the worst process
        return plan
    return carried
