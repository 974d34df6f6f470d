# SPDX-License-Identifier: Apache-2.0
"""Members: what each rank of a job tells the others of itself, and how large its memory is then."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from megatron_moevement.integrations.megatron.slot_layout import ALIGNMENT_BYTES
from megatron_moevement.policy.copies.placement import Host
from megatron_moevement.policy.copies.retention import LAG
from megatron_moevement.policy.copies.slot_ring import ring_bytes, ring_capacity
from megatron_moevement.policy.job.operators import Operator, OperatorId
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.slot_room import RankRoom
from megatron_moevement.runtime.slots.mapped_file import PAGE_BYTES, page_aligned
from megatron_moevement.runtime.slots.ring_file import RingShape
from megatron_moevement.runtime.upstream_log.log import buffer_bytes
from megatron_moevement.strategies.moevement.protection.spares import Spare

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Member:
    """What one rank tells the others of itself.

    Attributes:
        sizes: of what it captures and sends; no restart changes them, so that who knows them from
            before compares them and reads nothing.
        spares: processes without a rank that keep copies, as far as this rank found any.
    """

    host: Host
    sizes: str
    spares: tuple[Spare, ...] = ()

    @classmethod
    def of(
        cls,
        host: Host,
        operators: Sequence[Operator],
        extras_bytes: int,
        log_bytes: int = 0,
        spares: tuple[Spare, ...] = (),
    ) -> Member:
        """Returns a rank.

        Args:
            extras_bytes: room that the scalars and random streams of a slot need.
            log_bytes: what it sends over its stage's boundaries in a step; 0 without a log.
        """
        parts = [[str(op.id), op.full_bytes, op.compute_bytes] for op in operators]
        return cls(host, json.dumps([parts, extras_bytes, log_bytes]), spares)

    def document(self) -> dict[str, Any]:
        """Returns the member as JSON holds it."""
        return {
            "process": self.host.process,
            "domain": self.host.domain,
            "rank": str(self.host.rank),
            "sizes": self.sizes,
            "spares": [spare.document() for spare in self.spares],
        }

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> Member:
        """Returns the member of a document."""
        return cls(
            Host(document["process"], document["domain"], LogicalRank.parse(document["rank"])),
            document["sizes"],
            tuple(map(Spare.of_document, document["spares"])),
        )


@dataclasses.dataclass(frozen=True)
class RankSizes:
    """What `Member.sizes` has."""

    operators: tuple[Operator, ...]
    extras_bytes: int
    log_bytes: int


def sizes_reader() -> Callable[[str], RankSizes]:
    """Returns what reads `Member.sizes` of one rank after the other, equal ones once."""
    ids: dict[str, OperatorId] = {}

    @functools.cache
    def read(text: str) -> RankSizes:
        parts, extras_bytes, log_bytes = json.loads(text)
        for name, *_ in parts:
            if name not in ids:
                ids[name] = OperatorId.parse(name)
        operators = tuple(Operator(ids[name], full, compute) for name, full, compute in parts)
        return RankSizes(operators, extras_bytes, log_bytes)

    return read


@dataclasses.dataclass(frozen=True)
class LogShape:
    """Sizes of an upstream log: the most steps that it retains, and the bytes of each."""

    max_steps: int
    step_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of host memory."""
        return self.max_steps * buffer_bytes(self.step_bytes)


def ring_shapes(
    window: int, sizes: Mapping[LogicalRank, RankSizes], room: Mapping[LogicalRank, RankRoom]
) -> Mapping[LogicalRank, RingShape]:
    """Returns the sizes of the rings of all ranks, alignment and extras included.

    Slots of one size lie best in equal buffers; where W may change, they lie one behind the other.

    Args:
        window: the largest W.
        room: for what each rank captures.
    """
    capacity = ring_capacity(window, LAG)
    extras_bytes = max(own.extras_bytes for own in sizes.values())  # replicas lie alike

    def shape(rank: LogicalRank, own: RankSizes) -> RingShape:
        operators = len(own.operators)
        beside_bytes = ALIGNMENT_BYTES * operators + extras_bytes
        slot_bytes = room[rank].slot_bytes + beside_bytes
        equal = RingShape.equal(capacity, slot_bytes, operators + 1, extras_bytes)
        in_pages = room[rank].beside(beside_bytes + PAGE_BYTES, window)
        room_bytes = page_aligned(ring_bytes(in_pages, LAG))
        if equal.room_bytes <= room_bytes:
            return equal
        return dataclasses.replace(equal, room_bytes=room_bytes, granule_bytes=PAGE_BYTES)

    return _shared(sizes, shape)


def log_shapes(
    max_steps: int, sizes: Mapping[LogicalRank, RankSizes]
) -> Mapping[LogicalRank, LogShape]:
    """Returns the sizes of the logs of the ranks that send anything over a boundary."""
    shapes = {each: LogShape(max_steps, each) for each in {own.log_bytes for own in sizes.values()}}
    return {rank: shapes[own.log_bytes] for rank, own in sizes.items() if own.log_bytes}


def _shared(
    sizes: Mapping[LogicalRank, RankSizes], make: Callable[[LogicalRank, RankSizes], T]
) -> Mapping[LogicalRank, T]:
    """Returns what follows from the sizes of each rank, one object for replicas."""
    distinct = {id(own): (rank, own) for rank, own in sizes.items()}
    made = {key: make(rank, own) for key, (rank, own) in distinct.items()}
    return {rank: made[id(own)] for rank, own in sizes.items()}
