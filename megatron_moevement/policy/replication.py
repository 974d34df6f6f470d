"""Re-replication: which slots to copy from whom to whom after holders were lost."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum

from megatron_moevement.policy.persistence import SlotKey
from megatron_moevement.policy.placement import Host, Placement


class Urgency(IntEnum):
    """When a copy has to be made."""

    BEFORE_TRAINING = 0
    BACKGROUND = 1


@dataclasses.dataclass(frozen=True, order=True)
class Copy:
    """One transfer of one slot.

    Attributes:
        urgency: whether training waits for it.
        slot: what is copied.
        source: process that has it.
        target: process that gets it.
    """

    urgency: Urgency
    slot: SlotKey
    source: int
    target: int


@dataclasses.dataclass(frozen=True)
class ReplicationPlan:
    """What has to be copied until every slot has all its holders again.

    Attributes:
        copies: transfers in the order in which they start: the urgent ones first.
        under_replicated: for each slot with too few holders how many are missing now.
        lost: slots that nobody holds.
    """

    copies: tuple[Copy, ...]
    under_replicated: Mapping[SlotKey, int]
    lost: tuple[SlotKey, ...]


def plan_replication(
    held: Mapping[SlotKey, frozenset[int]],
    placement: Placement,
    hosts: Sequence[Host],
    sizes: Mapping[SlotKey, int] | None = None,
) -> ReplicationPlan:
    """Plans the copies that give every slot its own rank and r holders again.

    A slot whose live holders share one failure domain is in danger: its next copy is made before
    training resumes, the others in the background. A live holder keeps what it has: a copy goes to
    a process of the placement that has none, and the source with the least to send sends it.

    Args:
        held: for each slot that is still needed the live processes with a verified copy of it.
        placement: who is to keep copies from now on, made for `hosts`.
        hosts: the live processes.
        sizes: bytes of each slot, for an even load on the sources; equal sizes when left out.
    """
    process_of = {host.rank: host.process for host in hosts if host.rank is not None}
    domain_of = {host.process: host.domain for host in hosts}
    sent: Counter[int] = Counter()
    copies: list[Copy] = []
    missing: dict[SlotKey, int] = {}
    lost: list[SlotKey] = []
    for slot in sorted(held):
        live = held[slot].intersection(domain_of)
        if not live:
            lost.append(slot)
            continue
        wanted = (*placement.holders[slot.owner], process_of[slot.owner])
        targets = _targets(live, wanted, domain_of)
        if targets:
            missing[slot] = len(targets)
        for order, target in enumerate(targets):
            source = min(live, key=lambda process: (sent[process], process))
            sent[source] += sizes[slot] if sizes else 1
            urgent = order == 0 and len({domain_of[process] for process in live}) == 1
            urgency = Urgency.BEFORE_TRAINING if urgent else Urgency.BACKGROUND
            copies.append(Copy(urgency, slot, source, target))
    return ReplicationPlan(tuple(sorted(copies)), missing, tuple(lost))


def _targets(live: Iterable[int], wanted: Sequence[int], domain_of: Mapping[int, str]) -> list[int]:
    """Returns the processes that need a copy; one in a domain without a copy comes first."""
    safe = {domain_of[process] for process in live}
    targets = [process for process in wanted if process not in live]
    return sorted(targets, key=lambda process: domain_of[process] in safe)
