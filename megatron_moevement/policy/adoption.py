"""Adoption: which store a process goes on with that another one left, and when those may go."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from megatron_moevement.policy.ranks import LogicalRank
from megatron_moevement.policy.schedule import Window

NOTHING = (-1, -1)
"""The age of what is no state of the rank: older than any."""


class LeftState(Protocol):
    """What the journal of a store says of the state beside it."""

    @property
    def era(self) -> int:
        """How many rollbacks lie behind it."""

    @property
    def committed(self) -> int:
        """The newest step that it knows to be committed."""

    @property
    def rank(self) -> LogicalRank | None:
        """The rank of the process that it was."""


def age_of(state: LeftState | None, rank: LogicalRank) -> tuple[int, int]:
    """Returns what is greater the newer a rank's state is; nothing of another rank is newer."""
    if state is None or state.rank != rank:
        return NOTHING
    return (state.era, state.committed)


def may_forget_left(persisted: Window | None, *, is_returning: bool) -> bool:
    """Returns whether what the dead and former launches left is of no use any more.

    Args:
        persisted: the newest window that the present history has persisted.
        is_returning: whether a recovery is under way, which may still need it.
    """
    return persisted is not None and not is_returning


def of_no_use(left: Collection[int], known: Collection[int]) -> tuple[int, ...]:
    """Returns which stores are removed then: those that were left when the generation began.

    A process that has died since may be the only one that has its slots.

    Args:
        left: processes that are dead now and whose stores are there.
        known: those that had been dead when all others had opened theirs.
    """
    return tuple(sorted(process for process in left if process in known))
