# SPDX-License-Identifier: Apache-2.0
"""Operators: the units that are snapshotted, their bytes, and which logical rank holds what."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from enum import IntEnum
from functools import cached_property
from operator import attrgetter

from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.job.sharing import Shards, SharedItems, share


class OperatorKind(IntEnum):
    """What an operator is; the order of the members is the default order within a window."""

    EXPERT = 0
    GATE = 1
    NON_EXPERT = 2
    EMBEDDING = 3
    HEAD = 4


_NAME = re.compile(
    r"layers\.(?P<layer>\d+)\.(?:experts\.(?P<expert>\d+)|(?P<part>gate|rest))"
    r"|(?P<end>embedding|head)"
)
_KIND_OF_WORD = {
    "gate": OperatorKind.GATE,
    "rest": OperatorKind.NON_EXPERT,
    "embedding": OperatorKind.EMBEDDING,
    "head": OperatorKind.HEAD,
}
_NUMBERS = 1 << 30
"""How many layers there may be, and how many experts in each."""


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class OperatorId:
    """The name of an operator: the same on every rank that holds a replica or a shard of it.

    Attributes:
        layer: decoder layer, counted from 0 over the whole model; None at both ends of the model.
        expert: routed expert, counted from 0 over all expert-parallel ranks; None but for experts.
        number: made of the three, ascending by kind, layer and expert, less than 2^64; identity
            and order go by it, because planning hashes and sorts a hundred thousand of these.

    Raises:
        ValueError: the kind and the numbers contradict each other.
    """

    kind: OperatorKind = dataclasses.field(compare=False)
    layer: int | None = dataclasses.field(default=None, compare=False)
    expert: int | None = dataclasses.field(default=None, compare=False)
    number: int = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        in_layer = self.kind <= OperatorKind.NON_EXPERT
        if (self.layer is not None) != in_layer:
            raise ValueError(
                f"{self.kind.name} needs a layer"
                if in_layer
                else f"{self.kind.name} lies in no layer, {self.layer} was given"
            )
        layer, expert = self.layer or 0, self.expert or 0
        if not (0 <= layer < _NUMBERS and 0 <= expert < _NUMBERS):
            raise ValueError(f"layer {layer} or expert {expert} is not in 0 ... {_NUMBERS - 1}")
        if (self.expert is not None) != (self.kind is OperatorKind.EXPERT):
            raise ValueError(f"expert {self.expert} does not fit {self.kind.name}")
        object.__setattr__(self, "number", (self.kind * _NUMBERS + layer) * _NUMBERS + expert)

    def __hash__(self) -> int:
        return self.number

    def __str__(self) -> str:
        if self.kind is OperatorKind.EXPERT:
            return f"layers.{self.layer}.experts.{self.expert}"
        if self.kind is OperatorKind.GATE:
            return f"layers.{self.layer}.gate"
        if self.kind is OperatorKind.NON_EXPERT:
            return f"layers.{self.layer}.rest"
        return self.kind.name.lower()

    @classmethod
    def parse(cls, name: str) -> OperatorId:
        """Returns the operator of a name that `str` made.

        Raises:
            ValueError: no operator has that name.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(
                f"{name!r} names no operator: use layers.L.experts.E, layers.L.gate, "
                "layers.L.rest, embedding or head"
            )
        if match["end"]:
            return cls(_KIND_OF_WORD[match["end"]])
        layer = int(match["layer"])
        if match["part"]:
            return cls(_KIND_OF_WORD[match["part"]], layer)
        return cls(OperatorKind.EXPERT, layer, int(match["expert"]))


@dataclasses.dataclass(frozen=True, slots=True)
class Operator:
    """What one logical rank captures of one operator.

    Attributes:
        full_bytes: bytes of FULL on this rank: master weights, both moments and buffers; 0 where
            the rank's shard is empty.
        compute_bytes: bytes of COMPUTE on this rank: compute weights and buffers.

    Raises:
        ValueError: a size is negative.
    """

    id: OperatorId
    full_bytes: int
    compute_bytes: int

    def __post_init__(self) -> None:
        if self.full_bytes < 0 or self.compute_bytes < 0:
            raise ValueError(f"{self.id} has a negative size: {self}")


@dataclasses.dataclass(frozen=True)
class Inventory:
    """Every operator of the job: on which logical ranks it lies and what it weighs there.

    A rank that trains an operator lists it, even where its shard is empty: replicas must agree on
    its slot.

    Attributes:
        by_rank: for each logical rank its operators, each once.
        tied: sets of operators that share parameters across stages and hence their slot, such as
            the embedding and the head of a model with tied embeddings.

    Raises:
        ValueError: there is no rank or no operator, a rank lists an operator twice, or a tied one
            is missing.
    """

    by_rank: Mapping[LogicalRank, tuple[Operator, ...]]
    tied: tuple[frozenset[OperatorId], ...] = ()

    def __post_init__(self) -> None:
        if not self.by_rank:
            raise ValueError("an inventory needs at least one logical rank")
        if not any(self.by_rank.values()):
            raise ValueError("an inventory needs at least one operator")
        for operators in self.distinct.values():
            if len({operator.id for operator in operators}) != len(operators):
                rank = next(rank for rank, own in self.by_rank.items() if own is operators)
                raise ValueError(f"rank {rank} lists an operator twice")
        missing = frozenset().union(*self.tied).difference(self.operators)
        if missing:
            raise ValueError(f"no rank holds the tied {', '.join(map(str, sorted(missing)))}")

    @cached_property
    def ranks(self) -> tuple[LogicalRank, ...]:
        """All logical ranks, ascending."""
        return tuple(sorted(self.by_rank))

    @cached_property
    def distinct(self) -> Mapping[int, tuple[Operator, ...]]:
        """What ranks list, by `id`, where ranks have one and the same tuple once.

        Replicas without sharding may: they weigh the same in every slot.
        """
        return {id(self.by_rank[rank]): self.by_rank[rank] for rank in self.ranks}

    @cached_property
    def operators(self) -> frozenset[OperatorId]:
        """All operators of the job."""
        return frozenset(self.sorted_operators)

    @cached_property
    def sorted_operators(self) -> tuple[OperatorId, ...]:
        """All operators of the job, ascending."""
        ids = [operator.id for operators in self.distinct.values() for operator in operators]
        distinct = dict(zip(map(attrgetter("number"), ids), ids, strict=True))
        return tuple(map(distinct.__getitem__, sorted(distinct)))

    @cached_property
    def holders(self) -> Mapping[OperatorId, tuple[LogicalRank, ...]]:
        """For each operator the ranks that hold a replica or a shard of it, ascending."""
        holders: dict[OperatorId, list[LogicalRank]] = {}
        for rank in self.ranks:
            for operator in self.by_rank[rank]:
                holders.setdefault(operator.id, []).append(rank)
        return {operator: tuple(ranks) for operator, ranks in holders.items()}

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of `sorted_operators`: integers, which are looked up faster."""
        return tuple(map(attrgetter("number"), self.sorted_operators))

    @cached_property
    def tied_positions(self) -> tuple[tuple[int, ...], ...]:
        """The tied operators by their positions in `sorted_operators`."""
        if not self.tied:
            return ()
        position = {operator: place for place, operator in enumerate(self.sorted_operators)}
        return tuple(tuple(sorted(position[operator] for operator in tied)) for tied in self.tied)

    @cached_property
    def shared(self) -> tuple[SharedItems, ...]:
        """The operators by the ranks that hold them, in the order of `sorted_operators`."""
        position = dict(zip(self.numbers, range(len(self.numbers)), strict=True))
        shards = [
            Shards(
                list(map(position.__getitem__, map(attrgetter("id.number"), part))),
                list(map(attrgetter("full_bytes"), part)),
                list(map(attrgetter("compute_bytes"), part)),
            )
            for part in self.distinct.values()
        ]
        return share(shards, len(position), self.tied_positions)
