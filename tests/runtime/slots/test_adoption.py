# SPDX-License-Identifier: Apache-2.0
"""A rank goes on with the newest store that an occupant of it left on its machine."""

import contextlib
import dataclasses
import threading
from datetime import timedelta

import pytest

from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.slots.journal import JournalShape, JournalState
from megatron_moevement.runtime.slots.ring_file import RingShape
from megatron_moevement.runtime.stores.adoption import (
    adopt_store,
    take_in_flushed,
    take_in_left,
)
from megatron_moevement.runtime.stores.flushing import flush_store, flushed_folder
from megatron_moevement.runtime.stores.store import (
    RingRole,
    StoreDirectory,
    left_behind,
)
from tests.harness.one_schedule import one_schedule

from .conftest import IDENTITY, OWNER, fill

RING = RingShape.equal(capacity=3, buffer_bytes=200, max_parts=3)
JOURNAL = JournalShape(retained_steps=3, entry_bytes=100, last_step=10)
STATE = JournalState(
    rollbacks=0, timetable=one_schedule(2), committed=3, persisted=None, rank=OWNER
)


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
    leave(shared_memory, 5, step=2, rollbacks=1)
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
    leave(shared_memory, 7, step=6, rollbacks=1)
    leave(shared_memory, 0, step=3, rollbacks=1)
    with opened(shared_memory, 0) as own:
        assert take_in_left(own) == ()
        assert own.open_journal().state.committed == 3
    assert left_behind(shared_memory, IDENTITY.run_id) == (0, 5, 7)


def test_of_what_nobody_adopts_the_newest_is_taken_in(shared_memory):
    for process, step, changes in [
        (2, 6, {}),
        (5, 9, {}),
        (8, 8, {}),
        (11, 7, {"timetable": one_schedule(2, 1)}),
    ]:
        written = leave(shared_memory, process, step, **changes)
    with opened(shared_memory, 0) as own:
        assert take_in_left(own) == (11,)
        assert own.open_journal().state.committed == 7
        assert own.open_ring(RingRole.OWN, OWNER).records() == (written,)


@pytest.mark.parametrize(
    ("persisted", "replaces", "is_replaced"),
    [(4, True, True), (2, True, False), (4, False, False), (None, True, False)],
)
def test_a_newer_store_takes_the_place_of_slots_that_lie_before_its_window(
    shared_memory, persisted, replaces, is_replaced
):
    old = leave(shared_memory, 0, step=3)
    window = None if persisted is None else Window(persisted, 2)
    new = leave(shared_memory, 5, step=6, persisted=window)
    with opened(shared_memory, 0) as own:
        assert take_in_left(own, replaces=replaces) == ((5,) if is_replaced else ())
        assert own.open_journal().state.committed == (6 if is_replaced else 3)
        assert own.open_ring(RingRole.OWN, OWNER).records() == (new if is_replaced else old,)
    assert left_behind(shared_memory, IDENTITY.run_id) == ((0,) if is_replaced else (0, 5))


def flush(root, save, process, step, **changes):
    """Flushes the store of a process that kept the slots of another one's rank."""
    with opened(root, process) as store:
        state = dataclasses.replace(STATE, **{"committed": step, "rank": None, **changes})
        store.journal(JOURNAL).write_state(state)
        written = fill(store.ring(RingRole.HELD, OWNER, RING), step, byte=process + 1)
        flush_store(store, save)
        store.remove()
    return written


def test_what_was_flushed_without_a_rank_is_brought_back_by_one_process(shared_memory, tmp_path):
    written = flush(shared_memory, tmp_path, 5, step=6)
    flushed = [flushed_folder(tmp_path, IDENTITY)]
    ranks = [OWNER, LogicalRank(dp=1)]
    with opened(shared_memory, 0) as own, opened(shared_memory, 1) as other:
        assert adopt_store(own, OWNER, flushed) is None
        assert take_in_flushed(other, flushed, LogicalRank(dp=1), ranks) == ()
        assert other.is_empty
        assert take_in_flushed(own, flushed, OWNER, ranks) == (5,)
        assert own.open_journal().state.committed == 6
        assert own.open_ring(RingRole.HELD, OWNER).records() == (written,)
        assert take_in_flushed(own, flushed, OWNER, ranks) == ()


def test_a_rank_brings_back_what_it_flushed_for_others_though_its_own_slots_are_in_memory(
    shared_memory, tmp_path
):
    written = flush(shared_memory, tmp_path, 5, step=6, rank=LogicalRank(dp=1))
    flush(shared_memory, tmp_path, 7, step=7)
    flushed = [flushed_folder(tmp_path, IDENTITY)]
    with opened(shared_memory, 0) as store:
        state = dataclasses.replace(STATE, committed=6, rank=LogicalRank(dp=1))
        store.journal(JOURNAL).write_state(state)
    with opened(shared_memory, 0) as own:
        ranks = [OWNER, LogicalRank(dp=1)]
        assert adopt_store(own, LogicalRank(dp=1), flushed) is None
        assert take_in_flushed(own, flushed, LogicalRank(dp=1), ranks) == (5,)
        assert own.open_ring(RingRole.HELD, OWNER).records() == (written,)


def test_what_was_flushed_before_a_rollback_is_not_brought_back(shared_memory, tmp_path):
    flush(shared_memory, tmp_path, 5, step=6)
    flushed = [flushed_folder(tmp_path, IDENTITY)]
    leave(shared_memory, 0, step=3, rollbacks=1)
    with opened(shared_memory, 0) as own:
        assert adopt_store(own, OWNER, flushed) is None
        assert take_in_flushed(own, flushed, OWNER, [OWNER]) == ()
        assert own.open_journal().state.committed == 3


def hold(root, process, owner, step, **changes):
    """Leaves the store of a process without a rank that keeps a copy."""
    with opened(root, process) as store:
        state = dataclasses.replace(STATE, rank=None, committed=step, **changes)
        store.journal(JOURNAL).write_state(state)
        return fill(store.ring(RingRole.HELD, owner, RING), step, byte=process + 1)


def test_a_spare_that_adopts_a_store_keeps_its_own_copies(shared_memory):
    other = LogicalRank(dp=1)
    copy = hold(shared_memory, 0, other, step=6)
    written = leave(shared_memory, 5, step=7)
    with opened(shared_memory, 5) as store:
        fill(store.ring(RingRole.HELD, other, RING), 5, byte=6)
    with opened(shared_memory, 0) as own:
        assert adopt_store(own, OWNER) == 5
        assert own.open_ring(RingRole.OWN, OWNER).records() == (written,)
        held = own.open_ring(RingRole.HELD, other)
        assert held.records() == (copy,)
        assert held.damaged_parts(copy) == ()
        assert own.open_journal().state.rank == OWNER


def test_copies_of_an_older_era_make_room_for_what_is_adopted(shared_memory):
    other = LogicalRank(dp=1)
    hold(shared_memory, 0, other, step=6)
    leave(shared_memory, 5, step=2, rollbacks=1)
    with opened(shared_memory, 0) as own:
        assert adopt_store(own, OWNER) == 5
        assert own.open_ring(RingRole.HELD, other) is None
