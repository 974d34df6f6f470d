# SPDX-License-Identifier: Apache-2.0
"""Going on from a tier: what it has is put into the memory of every process, as if it lay there.

What follows is the recovery of a job of which all processes were killed.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from megatron_moevement.errors import UserError
from megatron_moevement.policy.facts.facts import Facts
from megatron_moevement.policy.job.guarantee import Computation, Computations
from megatron_moevement.policy.recovery.histories import next_rollbacks
from megatron_moevement.policy.recovery.plan import Plan
from megatron_moevement.policy.tiers.tier import (
    TierName,
    may_begin_with_tier,
    newer_than,
    reached_by,
)
from megatron_moevement.runtime.coordination.agreement import (
    as_user_error,
    gather_together,
)
from megatron_moevement.runtime.slots.journal import losses_of
from megatron_moevement.runtime.stores.store import RingRole
from megatron_moevement.runtime.tiers.manifests import read_manifest, whole_tiers
from megatron_moevement.runtime.tiers.part import (
    Author,
    DamagedPartError,
    NoRoomError,
    Part,
    load_slots,
    read_part,
)
from megatron_moevement.runtime.tiers.target import FLAG, Target
from megatron_moevement.strategies.live_objects import LiveObjects
from megatron_moevement.strategies.moevement.protection.host_memory import HostMemory

logger = logging.getLogger(__name__)


class Source(NamedTuple):
    """A tier, and the era of the history that goes on from it."""

    target: Target
    name: TierName
    rollbacks: int


class Restored(NamedTuple):
    """A tier that memory has now, and what its bits were computed with."""

    name: TierName
    computations: Computations


def restore_newest(
    target: Target,
    memory: HostMemory,
    objects: LiveObjects,
    facts: Facts,
    plan: Plan | None,
    *,
    say: Callable[[str], None],
) -> Restored | None:
    """Puts the newest tier into memory, where nothing else leads as far; every rank calls it.

    Args:
        memory: of this process; nothing of it is open yet.
        facts: of all processes.
        plan: that they lead to.
        say: prints a line for the user, on rank 0.

    Returns:
        What memory has now, and nothing else; None where no tier was needed.

    Raises:
        UserError: on all ranks: the target can't be read, or the tier is of a job of other flags.
    """
    if not may_begin_with_tier(facts):
        return None
    is_first = objects.rank == objects.layout.ranks[0]
    with as_user_error(
        f"can't read {FLAG} {target.place}: ", f"; make it readable, or leave {FLAG} out"
    ):
        listed = gather_together(
            lambda: (
                [[str(name) for name in whole_tiers(target)], int(time.time())]
                if is_first
                else None
            ),
            objects.device,
        )
    texts, now_s = listed[0]
    whole = [TierName.parse(text) for text in texts]
    eras = [process.rollbacks for process in facts.processes]
    for name in newer_than(whole, reached_by(plan, facts.durable)):
        source = Source(target, name, next_rollbacks([*eras, name.rollbacks], now_s))
        with as_user_error():
            found = gather_together(
                functools.partial(_restored, source, memory, objects), objects.device
            )
        reasons = [restored["reason"] for restored in found if "reason" in restored]
        if not reasons:
            say(f"goes on from the tier of step {name.committed} in {target.place}")
            authors = (Author.of_document(each["author"]) for each in found)
            return Restored(name, _computations(authors))
        memory.store.clear()
        if is_first:
            logger.warning(
                "the tier of step %d in %s can't be used, an older one is looked for: %s",
                name.committed,
                target.place,
                reasons[0],
            )
    return None


def _computations(authors: Iterable[Author]) -> Computations:
    """Returns what ranks computed with; what they have in common is there once."""
    known: dict[str, Computation] = {}
    by_rank, hosts = [], []
    for author in authors:
        by_rank.append(known.setdefault(repr(author.computation), author.computation))
        hosts.append(author.host)
    return Computations(by_rank, hosts)


def _restored(source: Source, memory: HostMemory, objects: LiveObjects) -> dict[str, Any]:
    """Puts this rank's part of a tier into memory.

    Returns:
        The rank that wrote it, or why the tier can't be used.

    Raises:
        UserError: it is of a job of other flags, or there is no room for it.
    """
    try:
        name = read_manifest(source.target, source.name).part_of(objects.rank)
        if name is None:
            return {"reason": f"it has no part of {objects.rank}"}
        part = read_part(source.target, source.name, name)
        _check(part.told.author, objects, source)
        _put(source, memory, part)
    except (DamagedPartError, OSError) as error:
        return {"reason": str(error)}
    except NoRoomError as error:
        raise UserError(
            f"{source.name} in {source.target.place}: {error}; launch with the kind of device that "
            f"wrote it, or without {FLAG}"
        ) from error
    return {"author": part.told.author.document()}


def _check(author: Author, objects: LiveObjects, source: Source) -> None:
    if author.fingerprint != objects.identity.portable_fingerprint:
        raise UserError(
            f"{source.name} in {source.target.place} was written by a job of other flags: launch "
            f"with those to go on from it, or give another {FLAG} to begin without it"
        )


def _put(source: Source, memory: HostMemory, part: Part) -> None:
    """Makes rings and journal as the rank would have left them; without the journal none counts."""
    store, plan, rank = memory.store, memory.plan, part.owner
    store.clear()
    ring = store.create_ring(RingRole.OWN, rank, plan.rings[rank])
    losses = losses_of(load_slots(source.target, source.name, part, ring, source.rollbacks))
    told = part.told
    state = dataclasses.replace(told.state, rollbacks=source.rollbacks, rank=rank)
    shape = plan.journal
    shape = dataclasses.replace(shape, last_step=max(shape.last_step, state.committed))
    before = min(told.entries, default=state.committed + 1) - 1
    try:
        store.begin_journal(
            shape, dataclasses.replace(state, committed=before), losses, told.schedules
        )
        journal = store.journal(shape)
        for step in sorted(told.entries):
            known = dataclasses.replace(state, committed=step)
            journal.commit(known, step, told.entries[step], losses.get(step))
    except ValueError as error:
        raise DamagedPartError(f"what {rank} has to remember: {error}") from error
