# SPDX-License-Identifier: Apache-2.0
"""Ordering: which operators should be FULL early in the window."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from itertools import repeat
from operator import attrgetter

from megatron_moevement.policy.job.operators import OperatorId, OperatorKind

Popularity = Mapping[OperatorId, float]
"""For each expert how often it is activated, reduced over data- and expert-parallel ranks."""


class Ordering(Enum):
    """How experts are ordered; each value is a choice of `--moevement-order`."""

    INDEX = "index"
    """By layer and number."""
    HARD = "hard"
    """By the number of tokens routed to the expert (section 3.5)."""
    SOFT = "soft"
    """By the sum of the gating probabilities (appendix on ordering)."""
    DECAYED = "decayed"
    """By a moving average of the counts (appendix on ordering)."""
    CAPACITY = "capacity"
    """By counts relative to the expert's capacity (appendix on ordering)."""


def order_operators(
    operators: Iterable[OperatorId],
    ordering: Ordering,
    popularity: Popularity | None = None,
    capacities: Mapping[OperatorId, float] | None = None,
) -> tuple[OperatorId, ...]:
    """Orders the operators of a job for a window (the paper's OrderOperators).

    Experts come first by ascending popularity, so that popular ones stay frozen longest; then
    gates, non-expert parts, the embedding and the head. Equals are ordered by layer and number. In
    a model without experts, layers come from the back to the front: head, last layer, ..., first
    layer, embedding (appendix on dense models), whatever `ordering` says.

    Args:
        popularity: counts for HARD and CAPACITY, probabilities for SOFT, averages for DECAYED;
            experts that are missing were never activated.
        capacities: for CAPACITY, the tokens each expert can process in a batch.

    Raises:
        ValueError: CAPACITY is asked for and an expert has no positive capacity.
    """
    operators = sorted(operators, key=attrgetter("number"))
    num_experts = bisect_right(operators, OperatorKind.EXPERT, key=attrgetter("kind"))
    experts = operators[:num_experts]
    if not experts:
        return tuple(sorted(operators, key=_back_to_front))
    popularity = scores_of(experts, ordering, popularity or {}, capacities or {})
    if popularity:
        scores = list(map(popularity.get, experts, repeat(0.0)))
        # stable: equals keep their order
        experts = [experts[place] for place in sorted(range(len(experts)), key=scores.__getitem__)]
    return (*experts, *operators[num_experts:])


def order_by_layers(
    operators: Iterable[OperatorId],
    together: Iterable[Sequence[OperatorId]],
    popularity: Popularity | None = None,
) -> tuple[OperatorId, ...]:
    """Orders operators where kernels skip the weight gradients of some experts only all at once.

    These experts come one after the other, each such set by what all of its experts are activated.

    Args:
        together: sets of experts; no expert is in two.
        popularity: as of `order_operators`, capacities taken into account.
    """
    operators = order_operators(operators, Ordering.INDEX)
    scores = popularity or {}
    sets = sorted(map(sorted, together), key=lambda own: own[0].number)
    sets.sort(key=lambda own: sum(scores.get(expert, 0) for expert in own))
    experts = [expert for own in sets for expert in own]
    placed = set(experts)
    return (*experts, *(one for one in operators if one not in placed))


def _back_to_front(operator: OperatorId) -> tuple[int, int, int]:
    if operator.layer is None:
        return (0 if operator.kind is OperatorKind.HEAD else 2), 0, operator.kind
    return 1, -operator.layer, operator.kind


def scores_of(
    experts: Iterable[OperatorId],
    ordering: Ordering,
    popularity: Popularity,
    capacities: Mapping[OperatorId, float],
) -> Popularity:
    """Returns what experts are ordered by; nothing for INDEX. Arguments as of `order_operators`.

    Raises:
        ValueError: CAPACITY is asked for and an expert has no positive capacity.
    """
    if ordering is Ordering.INDEX:
        return {}
    if ordering is not Ordering.CAPACITY:
        return popularity
    relative = {}
    for expert in experts:
        capacity = capacities.get(expert, 0.0)
        if capacity <= 0:
            raise ValueError(f"{expert} needs a positive capacity, has {capacity}")
        relative[expert] = popularity.get(expert, 0.0) / capacity
    return relative
