# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks write their tiers to the same place, from what each of them left there."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

_NAMED = 3
"""So many hosts are named; more are counted."""


@dataclasses.dataclass(frozen=True)
class Mark:
    """What a rank left in the place of the tiers.

    Attributes:
        host: name of its machine.
        failure: why it could leave nothing; None where it has, or had nothing to leave.
    """

    host: str
    failure: str | None


def apart(marks: Sequence[Mark], seen: Collection[int]) -> str | None:
    """Returns which ranks write elsewhere than the first one looks, in words; None where none does.

    A rank that could leave nothing says nothing of where it writes.

    Args:
        marks: of the ranks, in their order.
        seen: ranks whose mark the first rank has found.
    """
    elsewhere = [
        rank
        for rank, mark in enumerate(marks)
        if rank and mark.failure is None and rank not in seen
    ]
    if not elsewhere:
        return None
    hosts = list(dict.fromkeys(marks[rank].host for rank in elsewhere))
    names = ", ".join(hosts[:_NAMED])
    more = f" and {len(hosts) - _NAMED} more" if len(hosts) > _NAMED else ""
    return (
        f"what {len(elsewhere)} of {len(marks)} ranks wrote there (the first is rank "
        f"{elsewhere[0]}; on {names}{more}) is not what rank 0 on {marks[0].host} sees, so no tier "
        "would ever be whole"
    )
