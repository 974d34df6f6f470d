# SPDX-License-Identifier: Apache-2.0
"""Logical ranks: the positions of the job, and which of them train the same thing."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import NamedTuple

_NAME = re.compile(r"pp(\d+)\.dp(\d+)\.tp(\d+)\.cp(\d+)\.ep(\d+)")


class LogicalRank(NamedTuple):
    """A position of the job; a process occupies it. Everything durable is keyed by it.

    Attributes:
        pp: pipeline stage.
        dp: replica of the experts. Megatron's data-parallel rank is `dp * EP + ep`.
        tp: tensor-parallel rank.
        cp: context-parallel rank.
        ep: expert-parallel rank.
    """

    pp: int = 0
    dp: int = 0
    tp: int = 0
    cp: int = 0
    ep: int = 0

    def __str__(self) -> str:
        return f"pp{self.pp}.dp{self.dp}.tp{self.tp}.cp{self.cp}.ep{self.ep}"

    @classmethod
    @lru_cache(maxsize=1 << 16)  # each rank is named by several processes
    def parse(cls, name: str) -> LogicalRank:
        """Returns the rank of a name that `str` made.

        Raises:
            ValueError: no rank has that name.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"{name!r} names no logical rank: use pp0.dp0.tp0.cp0.ep0")
        return cls(*map(int, match.groups()))


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes of the job along each kind of parallelism: PP x DP x EP x TP x CP logical ranks.

    Ranks are numbered as Megatron does by default, `tp-cp-ep-dp-pp` from the fastest to the
    slowest. As in Megatron, expert parallelism is folded over data and context parallelism: with
    CP > 1, who holds which experts follows from `expert_parallel_rank`, not from `ep` alone. Each
    expert is split over TP as everything else is (Megatron's default).

    Attributes:
        pp: pipeline stages.
        dp: replicas of the experts; Megatron's data-parallel size is `dp * ep`.
        tp: ranks that share each layer.
        cp: ranks that share each sequence.
        ep: ranks that share the experts of a layer.
        chunks: model chunks per stage; more than one makes the schedule interleaved.

    Raises:
        ValueError: a size is less than one.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    chunks: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if size < 1:
                raise ValueError(f"layout: {field.name} is {size}, must be at least 1")

    @property
    def ranks_per_stage(self) -> int:
        """Logical ranks of one pipeline stage."""
        return self.dp * self.tp * self.cp * self.ep

    @property
    def num_ranks(self) -> int:
        """Logical ranks of the job."""
        return self.pp * self.ranks_per_stage

    def rank_at(self, number: int) -> LogicalRank:
        """Returns the logical rank of Megatron's global rank `number`, `0 <= number < num_ranks`.

        Raises:
            ValueError: the number lies outside of the job.
        """
        if not 0 <= number < self.num_ranks:
            raise ValueError(f"rank {number} lies outside of a job of {self.num_ranks}")
        number, tp = divmod(number, self.tp)
        number, cp = divmod(number, self.cp)
        number, ep = divmod(number, self.ep)
        pp, dp = divmod(number, self.dp)
        return LogicalRank(pp, dp, tp, cp, ep)

    @cached_property
    def ranks(self) -> tuple[LogicalRank, ...]:
        """All logical ranks by Megatron's global rank."""
        return tuple(self.rank_at(number) for number in range(self.num_ranks))

    def __contains__(self, rank: LogicalRank) -> bool:
        """Returns whether a logical rank is one of the job's."""
        sizes = (self.pp, self.dp, self.tp, self.cp, self.ep)
        return all(map(operator.lt, rank, sizes)) and min(rank) >= 0

    def stage_ranks(self, stage: int) -> tuple[LogicalRank, ...]:
        """Returns the ranks of a pipeline stage: those that roll back and replay together."""
        first = stage * self.ranks_per_stage
        return self.ranks[first : first + self.ranks_per_stage]

    def expert_parallel_rank(self, rank: LogicalRank) -> int:
        """Returns which part of each layer's experts a rank holds, `0 <= part < ep`."""
        return (rank.cp + self.cp * (rank.dp * self.ep + rank.ep)) % self.ep

    def experts_of(self, rank: LogicalRank, num_experts: int) -> range:
        """Returns the global numbers of the experts of each layer that a rank holds.

        Raises:
            ValueError: the experts can't be spread evenly.
        """
        if num_experts % self.ep:
            raise ValueError(f"{num_experts} experts can't be spread over EP {self.ep}")
        share = num_experts // self.ep
        first = self.expert_parallel_rank(rank) * share
        return range(first, first + share)

    def layers_of(self, stage: int, num_layers: int) -> Iterator[int]:
        """Yields the decoder layers of a stage, ascending.

        Layers that can't be spread evenly go to the first chunks, one more each.
        """
        parts = self.pp * self.chunks
        share, rest = divmod(num_layers, parts)
        for chunk in range(self.chunks):
            part = chunk * self.pp + stage
            first = part * share + min(part, rest)
            yield from range(first, first + share + (part < rest))
