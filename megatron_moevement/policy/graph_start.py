"""Where autograd graphs begin on a stage whose input wants no gradient while operators are frozen.

The backward pass of a layer makes collectives: expert-parallel ranks exchange the gradients of
tokens. They hold different experts, so one may train an operator of a layer in which its peer has
nothing but frozen ones. A graph that began at each rank's own first active operator would make the
collectives of some layers on one of them only. So it begins in the same layer on all ranks of the
stage: the first in which any of them trains an operator.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_moevement.policy.operators import OperatorId, OperatorKind

NO_LAYER = (1 << 31) - 1
"""Behind all layers: the graph begins in none of them."""


def first_layer(active: Iterable[OperatorId]) -> int:
    """Returns the first layer whose input must want a gradient for the sake of these operators.

    The embedding comes before all layers. The head makes no collective that only some ranks of a
    stage would take part in: all of them hold it.

    Args:
        active: the operators that one rank trains.
    """
    before_head = [one for one in active if one.kind is not OperatorKind.HEAD]
    return min((one.layer or 0 for one in before_head), default=NO_LAYER)


def graph_start(active_of_ranks: Iterable[Iterable[OperatorId]]) -> int:
    """Returns the layer in which the graphs of all ranks of a stage begin.

    Args:
        active_of_ranks: for each rank of the stage the operators that it trains.
    """
    return min(map(first_layer, active_of_ranks), default=NO_LAYER)
