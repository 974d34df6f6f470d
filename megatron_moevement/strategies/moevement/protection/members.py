"""Members: what each rank of a job tells the others of itself before anything is planned."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_moevement.policy.copies.placement import Host
from megatron_moevement.policy.job.operators import Operator, OperatorId
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.strategies.moevement.protection.spares import Spare


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
