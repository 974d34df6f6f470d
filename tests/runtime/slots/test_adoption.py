"""A rank goes on with the newest store that an occupant of it left on its machine."""

import dataclasses

import pytest

from megatron_moevement.policy.ranks import LogicalRank
from megatron_moevement.runtime.slots.adoption import adopt_store
from megatron_moevement.runtime.slots.journal import JournalState
from megatron_moevement.runtime.slots.store import (
    JournalShape,
    RingRole,
    RingShape,
    StoreDirectory,
    left_behind,
)

from .conftest import IDENTITY, OWNER, fill

RING = RingShape(capacity=3, buffer_bytes=200, max_parts=3)
JOURNAL = JournalShape(retained_steps=3, entry_bytes=100, last_step=10)
STATE = JournalState(era=0, epoch=0, committed=3, persisted=None, rank=OWNER)


def opened(root, process):
    return StoreDirectory(root, IDENTITY, process)


def leave(root, process, step, **changes):
    """Leaves the store of a process that had committed a step."""
    with opened(root, process) as store:
        store.journal(JOURNAL).write_state(
            dataclasses.replace(STATE, **{"committed": step, **changes})
        )
        return fill(store.ring(RingRole.OWN, OWNER, RING), step, byte=process + 1)


def test_the_newest_store_of_a_rank_is_moved_here(shared_memory):
    leave(shared_memory, 0, step=4)
    leave(shared_memory, 5, step=6)
    written = leave(shared_memory, 7, step=8)
    with opened(shared_memory, 0) as own:
        assert adopt_store(own, OWNER) == 7
        assert own.open_journal().state.committed == 8
        ring = own.open_ring(RingRole.OWN, OWNER)
        assert ring.records() == (written,)
        assert ring.damaged_parts(written) == ()
        assert left_behind(shared_memory, IDENTITY.run_id) == (5,)


@pytest.mark.parametrize(
    "changes", [{"rank": LogicalRank(dp=1)}, {"committed": 3}, {"committed": 4}, {"rank": None}]
)
def test_the_own_store_stays_where_the_other_is_older_or_another_ranks(shared_memory, changes):
    leave(shared_memory, 0, step=4)
    leave(shared_memory, 5, step=6, **changes)
    with opened(shared_memory, 0) as own:
        assert adopt_store(own, OWNER) is None
        assert own.open_journal().state.committed == 4


def test_a_later_era_is_newer_whatever_was_committed_before(shared_memory):
    leave(shared_memory, 0, step=9)
    leave(shared_memory, 5, step=2, era=1)
    with opened(shared_memory, 0) as own:
        assert adopt_store(own, OWNER) == 5


def test_the_store_of_a_live_process_is_nobody_elses(shared_memory):
    leave(shared_memory, 5, step=6)
    with opened(shared_memory, 0) as own, opened(shared_memory, 5):
        assert adopt_store(own, OWNER) is None


def test_with_nothing_left_nothing_is_adopted(shared_memory):
    with opened(shared_memory, 0) as own:
        assert adopt_store(own, OWNER) is None
        assert own.is_empty
