# SPDX-License-Identifier: Apache-2.0
"""Arithmetic: what each computation of a step depends on, as numbers of a `History`.

The fault-free reference and the ranks of the world use the same functions; what differs is what
they are called with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from megatron_moevement.policy.job.operators import OperatorId, OperatorKind
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.popularity import Popularity
from megatron_moevement.testing.world.live import Live
from megatron_moevement.testing.world.shape import Part, Shape
from megatron_moevement.testing.world.values import History

ABSENT = -1
"""In the place of a gradient that a frozen operator does not contribute."""


@dataclasses.dataclass(frozen=True)
class Local:
    """What one rank brings to the reduction of gradients.

    Attributes:
        chunks: for each chunk the number that stands for its gradients.
        frozen: operators that contribute none.
        losses: of its micro-batches, on the last stage.
    """

    chunks: tuple[int, ...]
    frozen: frozenset[OperatorId]
    losses: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Reduced:
    """What a reduction gives all its ranks.

    Attributes:
        gradients: for each operator of the stages its reduced gradient.
        tokens: for each gate the token counts of its experts.
        loss: mean loss, on the stages that know it.
        stands_for: one number for all of it.
    """

    gradients: Mapping[OperatorId, int]
    tokens: Mapping[OperatorId, int]
    loss: int
    stands_for: int


@dataclasses.dataclass(frozen=True)
class Entry:
    """The ledger entry of a step.

    Attributes:
        loss: mean loss.
        norm: global gradient norm.
        found_inf: whether the gradients of the dense and of the expert optimizer overflowed.
        popularity: what is known of the experts, in the first step of a window.
    """

    loss: int
    norm: int
    found_inf: tuple[bool, bool]
    popularity: Popularity | None = None


def weights_of(history: History, live: Live, part: Part) -> int:
    """Returns what a chunk is computed with: COMPUTE of its operators, buffers included."""
    numbers = []
    for operator in part.operators:
        full = live.active.get(operator)
        numbers.append(history.of("compute", full) if full is not None else live.frozen[operator])
        if operator.kind is OperatorKind.GATE:
            numbers.append(live.bias[operator])
    return history.of("weights", *numbers)


def batch(history: History, rank: LogicalRank, cursor: int, micro_batch: int) -> int:
    """Returns the input of a micro-batch: other data for each step and data-parallel rank."""
    return history.of("batch", cursor, rank.dp, rank.ep, micro_batch)


def reduce(history: History, shape: Shape, contributions: Mapping[LogicalRank, Local]) -> Reduced:
    """Reduces the gradients of all operators on the stages of the contributing ranks."""
    gradients: dict[OperatorId, int] = {}
    tokens: dict[OperatorId, int] = {}
    stages = {rank.pp for rank in contributions}
    for operator, holders in shape.holders.items():
        if holders[0].pp not in stages:
            continue
        chunk = shape.chunk_of[operator]
        numbers = []
        for rank in holders:
            local = contributions[rank]
            numbers.append(ABSENT if operator in local.frozen else local.chunks[chunk])
        gradients[operator] = history.of("gradient", operator.number, *numbers)
        if operator.kind is OperatorKind.GATE:
            counts = [contributions[rank].chunks[chunk] for rank in holders]
            tokens[operator] = history.of("tokens", *counts)
    for tied in shape.schedule.inventory.tied:
        if tied <= gradients.keys():
            both = history.of("tied", *(gradients[operator] for operator in sorted(tied)))
            gradients.update(dict.fromkeys(tied, both))
    losses = [local.losses for _, local in sorted(contributions.items()) if local.losses]
    loss = history.of("loss", *losses) if losses else ABSENT
    stands_for = history.of("gradients", *gradients.values())
    return Reduced(gradients, tokens, loss, stands_for)


def apply_gradients(
    history: History, live: Live, reduced: Reduced, entry: Entry, operators: Iterable[OperatorId]
) -> None:
    """Takes the optimizer step of some active operators, but where gradients overflowed."""
    for operator in operators:
        which = 1 if operator.kind is OperatorKind.EXPERT else 0
        if not entry.found_inf[which]:
            live.active[operator] = history.of(
                "update",
                live.active[operator],
                reduced.gradients[operator],
                *(live.scalers[which], entry.norm, live.step + 1),
            )


def end_step(history: History, live: Live, reduced: Reduced, entry: Entry) -> None:
    """Changes what finalizing and preparing would have changed, and advances cursor and step."""
    for gate, bias in live.bias.items():
        if gate in live.active:
            live.bias[gate] = history.of("bias update", bias, reduced.tokens[gate])
    live.scalers = [
        history.of("scaler update", scaler, found)
        for scaler, found in zip(live.scalers, entry.found_inf, strict=True)
    ]
    live.cursor = history.of("cursor", live.cursor)
    live.step += 1
