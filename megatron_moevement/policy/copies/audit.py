# SPDX-License-Identifier: Apache-2.0
"""Audits: ranks that hold the same state compare what they captured of it.

A slot has a checksum of each operator that is FULL in it, and replicas capture the same operators
in the same slot. One slot is compared per audit, another one each time: W audits cover all
operators.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping

from megatron_moevement.policy.job.ranks import LogicalRank


def is_audited(step: int, slot: int, *, interval: int, window: int) -> bool:
    """Returns whether the slot of S_step is compared.

    Audit m takes the first slot number m modulo W from step m times the interval on.
    """
    first = max(1, (step - window) // interval)
    return any(
        number * interval <= step < number * interval + window and number % window == slot
        for number in range(first, step // interval + 1)
    )


@dataclasses.dataclass(frozen=True)
class Difference:
    """An operator of which not all replicas captured the same.

    Attributes:
        odd: ranks whose state is not that of the most; where there is no majority, all of them.
        ranks: all that hold it.
    """

    operator: str
    odd: tuple[str, ...]
    ranks: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Audit:
    """What an audit came to.

    Attributes:
        operators: how many had replicas to be compared with.
    """

    operators: int
    differences: tuple[Difference, ...]


def audit(captured: Mapping[LogicalRank, Mapping[str, str]]) -> Audit:
    """Compares what the ranks of a stage captured at one step.

    Tensor-parallel ranks hold parts of their own; other ranks that have an operator hold the same.

    Args:
        captured: for each rank the checksum of each operator that is FULL in its slot.
    """
    sums: dict[tuple[int, str], dict[LogicalRank, str]] = defaultdict(dict)
    for rank, parts in captured.items():
        for operator, checksum in parts.items():
            sums[rank.tp, operator][rank] = checksum
    replicated = {key: held for key, held in sorted(sums.items()) if len(held) > 1}
    differences = []
    for (_, operator), held in replicated.items():
        (most, count), *others = Counter(held.values()).most_common()
        if others:
            is_majority = count > others[0][1]
            odd = [rank for rank, each in held.items() if each != most or not is_majority]
            differences.append(
                Difference(operator, tuple(map(str, sorted(odd))), tuple(map(str, sorted(held))))
            )
    return Audit(len(replicated), tuple(differences))
