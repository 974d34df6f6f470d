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
    trained_again,
)
from megatron_moevement.runtime.coordination.agreement import (
    as_user_error,
    gather_together,
)
from megatron_moevement.runtime.observation.notices import Notices
from megatron_moevement.runtime.slots.journal import losses_of
from megatron_moevement.runtime.stores.store import RingRole
from megatron_moevement.runtime.tiers.manifests import read_manifest, whole_tiers
from megatron_moevement.runtime.tiers.part import (
    Author,
    DamagedPartError,
    Part,
    check_slots,
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


class Outcome(NamedTuple):
    """What came of the search for a tier.

    Attributes:
        restored: None where there is none, or none is needed.
        is_cleared: whether memory lacks what it had before.
        trained_again: committed steps after the tier, as far as any process remembers them.
    """

    restored: Restored | None = None
    is_cleared: bool = False
    trained_again: int | None = None


def restore_newest(
    target: Target,
    memory: HostMemory,
    objects: LiveObjects,
    facts: Facts,
    plan: Plan | None,
    *,
    give_up: Callable[[], None],
    notices: Notices,
) -> Outcome:
    """Puts the newest tier into memory, where nothing else leads as far; every rank calls it.

    What memory leads to is kept until all bytes of a tier were found to be right.

    Args:
        memory: of this process; nothing of it is open yet.
        facts: of all processes.
        plan: that they lead to.
        give_up: is called before memory has the tier: no state of this process counts any more.
        notices: lines for the user, printed on rank 0.

    Raises:
        UserError: on all ranks: the target can't be read, or the tier is of a job of other flags.
    """
    if not may_begin_with_tier(facts, plan):
        return Outcome()
    whole, now_s = _whole(target, objects)
    eras = [process.rollbacks for process in facts.processes]
    is_cleared = False
    for name in newer_than(whole, reached_by(plan, facts.durable)):
        source = Source(target, name, next_rollbacks([*eras, name.rollbacks], now_s))
        check = functools.partial(
            _check, source, memory, objects, reads_all=plan is not None and not is_cleared
        )
        found = _gathered(check, objects)
        reasons = [each["reason"] for each in found if "reason" in each]
        if not reasons:
            give_up()
            is_cleared = True
            put = _gathered(functools.partial(_restore, source, memory, objects), objects)
            reasons = [each["reason"] for each in put if "reason" in each]
        if not reasons:
            again = trained_again(plan, name)
            tell = notices.warn if again else notices.say
            tell(_line(source, again))
            authors = (Author.of_document(each["author"]) for each in found)
            return Outcome(Restored(name, _computations(authors)), is_cleared, again)
        if is_cleared:
            memory.store.clear()
        if objects.rank == objects.layout.ranks[0]:
            logger.warning(
                "the tier of step %d in %s can't be used, an older one is looked for: %s",
                *(name.committed, target.place, reasons[0]),
            )
    return Outcome(None, is_cleared)


def _whole(target: Target, objects: LiveObjects) -> tuple[list[TierName], int]:
    """Returns the tiers that are whole, and the time, as the first rank finds both."""
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
    return [TierName.parse(text) for text in texts], now_s


def _gathered(call: Callable[[], dict[str, Any]], objects: LiveObjects) -> list[dict[str, Any]]:
    """Returns what a call gives on each rank."""
    with as_user_error():
        return gather_together(call, objects.device)


def _line(source: Source, again: int | None) -> str:
    more = "" if again is None else f"; {again} committed steps are done again"
    return f"goes on from the tier of step {source.name.committed} in {source.target.place}{more}"


def _computations(authors: Iterable[Author]) -> Computations:
    """Returns what ranks computed with; what they have in common is there once."""
    known: dict[str, Computation] = {}
    by_rank, hosts = [], []
    for author in authors:
        by_rank.append(known.setdefault(repr(author.computation), author.computation))
        hosts.append(author.host)
    return Computations(by_rank, hosts)


def _check(
    source: Source, memory: HostMemory, objects: LiveObjects, *, reads_all: bool
) -> dict[str, Any]:
    """Looks at this rank's part of a tier.

    Args:
        reads_all: its slots, too.

    Returns:
        The rank that wrote it, or why the tier can't be used.

    Raises:
        UserError: it is of a job of other flags, or there is no room for it.
    """
    shape = memory.plan.rings[objects.rank]
    try:
        part = _part(source, objects)
        if part.told.author.fingerprint != objects.identity.portable_fingerprint:
            window = len(part.slots)
            raise UserError(
                f"{source.name} in {source.target.place} was written by a job of other flags, with "
                f"W = {window}: launch with those to go on from it (--moevement-window {window} "
                "where it had a W, else its limits of W), or give another "
                f"{FLAG} to begin without it"
            )
        if not shape.has_room_for_all(part.slots):
            raise UserError(
                f"{source.name} in {source.target.place}: no room for its {len(part.slots)} slots; "
                f"launch with the kind of device and the W that wrote them, or without {FLAG}"
            )
        if reads_all:
            check_slots(source.target, source.name, part)
    except (DamagedPartError, OSError) as error:
        return {"reason": str(error)}
    return {"author": part.told.author.document()}


def _part(source: Source, objects: LiveObjects) -> Part:
    name = read_manifest(source.target, source.name).part_of(objects.rank)
    if name is None:
        raise DamagedPartError(f"it has no part of {objects.rank}")
    return read_part(source.target, source.name, name)


def _restore(source: Source, memory: HostMemory, objects: LiveObjects) -> dict[str, Any]:
    """Puts this rank's part of a tier into memory.

    Returns:
        Why the tier can't be used, if it can't.
    """
    try:
        _put(source, memory, _part(source, objects))
    except (DamagedPartError, OSError) as error:
        return {"reason": str(error)}
    return {}


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
