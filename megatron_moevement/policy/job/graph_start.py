# SPDX-License-Identifier: Apache-2.0
"""Where autograd graphs begin on a stage whose input wants no gradient while operators are frozen.

The backward pass of a layer makes collectives: expert-parallel ranks exchange the gradients of
tokens. They hold different experts, so one may train an operator of a layer in which its peer has
nothing but frozen ones. A graph that began at each rank's own first active operator would make the
collectives of some layers on one of them only. So it begins in the same layer on all ranks of the
stage: the first in which any of them trains an operator.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from megatron_moevement.policy.job.operators import OperatorId, OperatorKind

NO_LAYER = (1 << 31) - 1
"""Behind all layers: the graph begins in none of them."""


def first_layer(active: Iterable[OperatorId]) -> int:
    """Returns the first layer whose input must want a gradient for the sake of these operators.

    The embedding comes before all layers. The head makes no collective that only some ranks of a
    stage would take part in: all of them hold it.
    """
    before_head = [one for one in active if one.kind is not OperatorKind.HEAD]
    return min((one.layer or 0 for one in before_head), default=NO_LAYER)


def vote(frozen: Collection[OperatorId], active: Iterable[OperatorId]) -> tuple[int, int]:
    """Returns what one rank brings: the least of each number decides for its stage."""
    return -len(frozen), first_layer(active)


def decided(least: Sequence[int]) -> tuple[bool, int]:
    """Returns whether a rank of the stage has frozen operators, and in which layer graphs begin.

    Args:
        least: of the votes of all ranks of the stage.
    """
    fewest, start = least
    return fewest < 0, start
