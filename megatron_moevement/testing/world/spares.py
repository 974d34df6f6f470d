"""Spares: which idle process takes which lost logical rank; the launcher of a job decides it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_moevement.policy.copies.placement import Host
from megatron_moevement.policy.job.ranks import LogicalRank


def assign_spares(
    hosts: Sequence[Host], lost: Mapping[LogicalRank, str]
) -> Mapping[LogicalRank, int]:
    """Gives lost logical ranks to spares; survivors keep theirs.

    A spare in the failure domain of the lost process comes first: it may adopt the store that was
    left there. Ranks that find no spare are missing from the result.

    Args:
        hosts: the live processes, in any order; those without a rank are spares.
        lost: for each logical rank without a process the domain of the one that it had.
    """
    spares = sorted((host for host in hosts if host.rank is None), key=lambda host: host.process)
    near: dict[LogicalRank, int] = {}
    for rank in sorted(lost):
        there = next((spare for spare in spares if spare.domain == lost[rank]), None)
        if there is not None:
            near[rank] = there.process
            spares.remove(there)
    others = (rank for rank in sorted(lost) if rank not in near)
    return near | {rank: spare.process for rank, spare in zip(others, spares, strict=False)}
