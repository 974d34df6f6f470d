# SPDX-License-Identifier: Apache-2.0
"""Adoption: which store a process goes on with that another one left, and when those may go."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from megatron_moevement.policy.copies.journal_state import JournalState
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import Window

NOTHING = (-1, -1)
"""The age of what is no state of the rank: older than any."""


def age_of(state: JournalState | None, rank: LogicalRank, *, rollbacks: int = 0) -> tuple[int, int]:
    """Returns what is greater the newer a rank's state is; nothing of another rank is newer.

    Args:
        rollbacks: of the process that wants it, as one that kept copies before it had a rank; what
            lies before it is of no use.
    """
    if state is None or state.rank != rank or state.rollbacks < rollbacks:
        return NOTHING
    return (state.rollbacks, state.committed)


def newest_first(left: Mapping[int, JournalState]) -> tuple[int, ...]:
    """Returns in which order stores are taken in: the newest of them first.

    Args:
        left: what the journal of each store says, by the process that left it.
    """
    return tuple(sorted(left, key=lambda process: (_moment(left[process]), -process), reverse=True))


def is_newer(left: JournalState, own: JournalState) -> bool:
    """Returns whether the journal of a left store is newer than the own one."""
    return _moment(left) > _moment(own)


def is_outdated(rollbacks: int, schedule_version: int, step: int, known: JournalState) -> bool:
    """Returns whether a state lies before the newest window that a history has persisted.

    Args:
        schedule_version: that a slot was captured under, or the newest one that a store knows.
    """
    if known.persisted is None:
        return False
    return (rollbacks, schedule_version, step) < (
        known.rollbacks,
        known.persisted.schedule_version,
        known.persisted.start,
    )


def _moment(state: JournalState) -> tuple[int, int, int]:
    return (state.rollbacks, state.timetable.first_version, state.committed)


def adopts_in(generation: int, *, is_refused: bool) -> bool:
    """Returns whether a process that first opens its store goes on with what another one left.

    It does so in any generation: the launch may have lost a process before it had opened its own.

    Args:
        is_refused: whether what died in place is to be left alone.
    """
    return generation == 0 or not is_refused


def share_of_flushed(
    flushed: Mapping[int, LogicalRank | None], rank: LogicalRank, ranks: Sequence[LogicalRank]
) -> tuple[int, ...]:
    """Returns from which flushed stores a rank brings back what it lacks, for itself and others.

    Its own may hold the last slots of somebody else, although it went on with a store in memory. A
    process that only kept copies flushed without a rank: all ranks share those.

    Args:
        flushed: the rank of each process that flushed, which all ranks see alike.
    """
    nameless = sorted(process for process, named in flushed.items() if named is None)
    own = [process for process, named in flushed.items() if named == rank]
    return tuple(sorted([*own, *nameless[ranks.index(rank) :: len(ranks)]]))


def may_forget_left(complete: Window | None, *, is_returning: bool) -> bool:
    """Returns whether what nobody is to keep any more is of no use.

    That is what the dead and former launches left, and what processes kept by former plans. The
    window that the plan of a recovery goes on from is no reason: training resumes while some of its
    copies are on their way.

    Args:
        complete: the newest window of which all ranks have acknowledged all copies since the
            generation began.
        is_returning: whether a recovery is under way, which may still need it.
    """
    return complete is not None and not is_returning


def of_no_use(left: Collection[int], known: Collection[int]) -> tuple[int, ...]:
    """Returns which stores are removed then: those that were left when the generation began.

    A process that has died since may be the only one that has its slots.

    Args:
        left: processes that are dead now and whose stores are there.
        known: those that had been dead when all others had opened theirs.
    """
    return tuple(sorted(process for process in left if process in known))
