# SPDX-License-Identifier: Apache-2.0
"""Model shapes: the inventory of a transformer that does not exist yet, from its sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from enum import Enum

from megatron_moevement.policy.job.operators import Inventory, Operator, OperatorId, OperatorKind
from megatron_moevement.policy.job.ranks import Layout, LogicalRank
from megatron_moevement.policy.job.state_recipe import RECIPES, Content, NumberType, StateRecipe


class Capture(Enum):
    """What each of the ranks that hold the same parameters captures of them."""

    WHOLE = "whole"
    """All of it."""
    SHARD = "shard"
    """An equal part: its own optimizer shard, or one that was agreed on."""


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Sizes of a GPT with or without experts, named as Megatron-LM's flags.

    Attributes:
        hidden_size: width of the residual stream.
        ffn_hidden_size: inner width of a dense MLP.
        num_experts: routed experts of every layer; 0 for a dense model.
        moe_ffn_hidden_size: inner width of one expert.
        moe_shared_expert_intermediate_size: inner width of all shared experts together.
        mlp_matrices: 2, or 3 with a gated activation such as SwiGLU.
        tied_embeddings: whether embedding and head are one matrix.

    Raises:
        ValueError: a size is negative, or one that the model can't do without is 0.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    vocab_size: int
    num_experts: int = 0
    moe_ffn_hidden_size: int = 0
    moe_shared_expert_intermediate_size: int = 0
    mlp_matrices: int = 3
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        needed = ["num_layers", "hidden_size", "vocab_size"]
        needed.append("moe_ffn_hidden_size" if self.num_experts else "ffn_hidden_size")
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < (field.name in needed):
                raise ValueError(f"{field.name} {getattr(self, field.name)} is too small")

    def parameters(self, kind: OperatorKind) -> tuple[int, int]:
        """Returns the parameters of an operator that tensor parallelism splits, and the others."""
        hidden = self.hidden_size
        if kind is OperatorKind.EXPERT:
            return self.mlp_matrices * hidden * self.moe_ffn_hidden_size, 0
        if kind is OperatorKind.GATE:
            return 0, hidden * self.num_experts
        if kind is OperatorKind.NON_EXPERT:
            inner = (
                self.moe_shared_expert_intermediate_size
                if self.num_experts
                else self.ffn_hidden_size
            )
            return 4 * hidden * hidden + self.mlp_matrices * hidden * inner, 2 * hidden
        final_norm = hidden if kind is OperatorKind.HEAD else 0
        return self.vocab_size * hidden, final_norm


def inventory_of(
    shape: ModelShape,
    layout: Layout,
    capture: Capture,
    recipe: StateRecipe = RECIPES[NumberType.BF16],
) -> Inventory:
    """Returns the inventory of a model that is spread over a layout.

    Raises:
        ValueError: the experts can't be spread evenly over the expert-parallel ranks.
    """
    each = list(map(recipe.bytes_per_parameter, (Content.FULL, Content.COMPUTE)))
    by_rank: dict[LogicalRank, tuple[Operator, ...]] = {}
    ids: dict[tuple[OperatorKind, int | None, int | None], OperatorId] = {}
    for stage in range(layout.pp):
        ranks = layout.stage_ranks(stage)
        layers = list(layout.layers_of(stage, shape.num_layers))
        alike: dict[tuple[int, int, int], tuple[Operator, ...]] = {}
        for rank, (dense, expert) in zip(ranks, _shares(layout, ranks, capture), strict=True):
            key = (dense, expert, layout.expert_parallel_rank(rank))
            if key not in alike:
                experts = layout.experts_of(rank, shape.num_experts)
                alike[key] = tuple(
                    Operator(
                        ids.setdefault(name, OperatorId(*name)),
                        *(one * _parameters(shape, layout, capture, key, name[0]) for one in each),
                    )
                    for name in _names(shape, layout, stage, layers, experts)
                )
            by_rank[rank] = alike[key]
    tied = frozenset({OperatorId(OperatorKind.EMBEDDING), OperatorId(OperatorKind.HEAD)})
    return Inventory(by_rank, (tied,) if shape.tied_embeddings else ())


def _shares(
    layout: Layout, ranks: Sequence[LogicalRank], capture: Capture
) -> Iterator[tuple[int, int]]:
    """Yields for each rank of a stage which part of the dense and of the expert shards it has."""
    seen: dict[tuple[int, int], int] = {}
    for rank in ranks:
        if capture is Capture.WHOLE:
            yield 0, 0
            continue
        part = layout.expert_parallel_rank(rank)
        dense, expert = seen.get((rank.tp, -1), 0), seen.get((rank.tp, part), 0)
        seen[rank.tp, -1], seen[rank.tp, part] = dense + 1, expert + 1
        yield dense, expert


def _names(
    shape: ModelShape, layout: Layout, stage: int, layers: Sequence[int], experts: range
) -> Iterator[tuple[OperatorKind, int | None, int | None]]:
    for layer in layers:
        for expert in experts:
            yield OperatorKind.EXPERT, layer, expert
        if shape.num_experts:
            yield OperatorKind.GATE, layer, None
        yield OperatorKind.NON_EXPERT, layer, None
    if stage == 0:
        yield OperatorKind.EMBEDDING, None, None
    if stage == layout.pp - 1:
        yield OperatorKind.HEAD, None, None


def _parameters(
    shape: ModelShape,
    layout: Layout,
    capture: Capture,
    shares: tuple[int, int, int],
    kind: OperatorKind,
) -> int:
    """Returns how many parameters of an operator one rank captures."""
    split, whole = shape.parameters(kind)
    if kind is OperatorKind.HEAD and shape.tied_embeddings and layout.pp == 1:
        split = 0  # the matrix is the embedding's own; further stages hold a copy
    parameters = -(-split // layout.tp) + whole
    if capture is Capture.SHARD:
        replicas = layout.dp * layout.cp
        dense, expert, _ = shares
        if kind is OperatorKind.EXPERT:
            return _part(parameters, replicas, expert)
        return _part(parameters, replicas * layout.ep, dense)
    return parameters


def _part(total: int, parts: int, number: int) -> int:
    """Returns the size of part `number` of `total` that is cut as evenly as can be."""
    return total * (number + 1) // parts - total * number // parts
