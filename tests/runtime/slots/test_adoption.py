"""A rank goes on with the newest store that an occupant of it left on its machine."""

import contextlib
import dataclasses
import threading
from datetime import timedelta

import pytest

from megatron_moevement.policy.ranks import LogicalRank
from megatron_moevement.runtime.slots.adoption import adopt_store, take_in_left
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


def test_what_the_own_store_holds_of_another_rank_stays(shared_memory):
    other = LogicalRank(dp=1)
    with opened(shared_memory, 0) as store:
        store.journal(JOURNAL).write_state(dataclasses.replace(STATE, rank=other))
        kept = fill(store.ring(RingRole.OWN, other, RING), 2, byte=9)
    written = leave(shared_memory, 5, step=3)
    with opened(shared_memory, 0) as own:
        assert adopt_store(own, OWNER) == 5
        assert own.open_journal().state.rank == OWNER
        assert own.open_ring(RingRole.OWN, OWNER).records() == (written,)
        assert own.open_ring(RingRole.OWN, other).records() == (kept,)


@pytest.mark.parametrize("moved", range(3))
def test_an_adoption_that_a_death_cuts_short_is_ended_by_the_next_process(
    shared_memory, monkeypatch, moved
):
    other = LogicalRank(dp=1)
    leave(shared_memory, 5, step=3)
    with opened(shared_memory, 5) as store:
        fill(store.ring(RingRole.HELD, other, RING), 2, byte=9)
    moves = []

    def move(source, target):
        if len(moves) == moved:
            raise KeyboardInterrupt
        moves.append(target)
        source.rename(target)

    with monkeypatch.context() as patch, opened(shared_memory, 0) as own:
        patch.setattr("os.replace", move)
        with contextlib.suppress(KeyboardInterrupt):
            adopt_store(own, OWNER)
    with opened(shared_memory, 1) as own:
        assert adopt_store(own, OWNER) is not None
        rings = {(ring.role, ring.owner) for ring in own.rings()}
    assert rings == {(RingRole.OWN, OWNER), (RingRole.HELD, other)}
    assert left_behind(shared_memory, IDENTITY.run_id) == (1,)


def test_the_lock_of_a_process_that_dies_is_waited_for(shared_memory):
    leave(shared_memory, 5, step=6)
    dying = opened(shared_memory, 5)
    end = threading.Timer(0.3, dying.close)
    with opened(shared_memory, 0) as own:
        end.start()
        assert adopt_store(own, OWNER, patience=timedelta(seconds=30)) == 5
    end.join()


def test_a_process_that_hangs_is_not_waited_for_any_longer(shared_memory):
    leave(shared_memory, 5, step=6)
    with opened(shared_memory, 0) as own, opened(shared_memory, 5):
        assert adopt_store(own, OWNER, patience=timedelta(seconds=0.1)) is None


def test_what_nobody_adopts_is_taken_in_with_the_journal_that_is_missing(shared_memory):
    written = leave(shared_memory, 5, step=6)
    with opened(shared_memory, 0) as own:
        assert adopt_store(own, LogicalRank(dp=1)) is None
        assert take_in_left(own) == (5,)
        assert own.open_journal().state.committed == 6
        assert own.open_ring(RingRole.OWN, OWNER).records() == (written,)
        assert take_in_left(own) == ()
    assert left_behind(shared_memory, IDENTITY.run_id) == (0,)


def test_another_history_is_not_taken_in_nor_what_is_there_already(shared_memory):
    leave(shared_memory, 5, step=6)
    leave(shared_memory, 7, step=6, era=1)
    leave(shared_memory, 0, step=3, era=1)
    with opened(shared_memory, 0) as own:
        assert take_in_left(own) == ()
        assert own.open_journal().state.committed == 3
    assert left_behind(shared_memory, IDENTITY.run_id) == (0, 5, 7)
