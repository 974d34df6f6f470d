# SPDX-License-Identifier: Apache-2.0
"""What a process without a rank keeps, and what ranks learn of it."""

import dataclasses

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.policy.facts.facts import Holding
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.coordination.notice_board import Topic
from megatron_moevement.runtime.slots.slot_record import SlotPart, SlotRecord
from megatron_moevement.runtime.stores.store import (
    RingRole,
    StoreDirectory,
    process_folder,
)
from megatron_moevement.strategies.moevement.protection import reserve
from megatron_moevement.strategies.moevement.protection.first_captures import record_digest
from megatron_moevement.strategies.moevement.protection.reserve import ReserveSizes
from megatron_moevement.strategies.moevement.protection.spares import (
    NoticesOfSpares,
    find_spares,
)
from tests.harness.kept_spare import (
    IDENTITY,
    JOURNAL,
    ONE,
    OTHER,
    PROCESS,
    PROCESSES,
    RING,
    STATE,
    WINDOW,
    await_made,
    store_slots,
    told,
)
from tests.harness.one_schedule import one_schedule


def test_what_a_spare_keeps_is_known_in_the_next_generation(spare):
    memory, generation = spare()
    (found,) = find_spares(generation)
    assert (found.process, found.domain, dict(found.held)) == (PROCESS, "node2", {})
    assert NoticesOfSpares(generation.board, [found]).facts() == ()
    memory.learn(told())
    memory.learn(told(OTHER))
    store_slots(memory, ONE, 3, 4, 5, 6)
    store_slots(memory, OTHER, 3, 4)
    _, generation = spare()
    (found,) = find_spares(generation)
    assert dict(found.held) == {ONE: 6, OTHER: 4}
    notices = NoticesOfSpares(generation.board, [found])
    (facts,) = notices.facts()
    assert facts.is_new
    assert (facts.rank, facts.committed, facts.rollbacks, facts.persisted) == (None, 6, 7, WINDOW)
    assert facts.ledger == range(4, 7)
    assert facts.holdings == (
        Holding(ONE, WINDOW, 0b111),
        Holding(ONE, Window(6, 3), 0b001),
        Holding(OTHER, WINDOW, 0b011),
    )
    known = notices.ledger(PROCESS, range(5, 7))
    assert known["entries"] == {5: "entry 5", 6: "entry 6"}
    assert sorted(known["losses"]) == list(range(1, 7))
    (captures,) = notices.captures(STATE.rollbacks, 0)
    held = spare.kept.store.open_ring(RingRole.HELD, OTHER)
    assert captures[str(OTHER)] == {step: record_digest(held.record(step)) for step in (3, 4)}
    assert sorted(captures[str(ONE)]) == [3, 4, 5, 6]
    assert notices.captures(STATE.rollbacks, 1) == ()
    journal = spare.kept.store.open_journal()
    assert journal.losses() == {step: step / 8 for step in range(1, 7)}
    assert journal.entry(5) == b"entry 5"


def test_news_go_on_from_what_was_told_before(spare):
    memory, _ = spare()
    memory.learn(told())
    memory.learn(told(first=7, committed=8, persisted=Window(6, 3)))
    memory.learn(told(OTHER, committed=7))
    state = spare.kept.store.open_journal().state
    assert (state.committed, state.persisted) == (8, Window(6, 3))
    assert spare.kept.store.open_journal().entries() == range(4, 9)


def test_a_generation_goes_on_with_what_its_ranks_agreed_on(spare):
    memory, _ = spare()
    memory.learn(told(committed=8))
    memory, _ = spare()
    memory.learn(told(committed=7))
    assert spare.kept.store.open_journal().state.committed == 7


@pytest.mark.parametrize(
    "changes", [{"rollbacks": 9}, {"timetable": one_schedule(3, 1)}, {"rollbacks": 5}]
)
def test_slots_of_another_history_are_forgotten(spare, changes):
    memory, _ = spare()
    memory.learn(told())
    store_slots(memory, ONE, 3, 4, 5)
    memory.learn(told(OTHER))
    memory, _ = spare()
    memory.learn(told(OTHER, persisted=None, **changes))
    store = spare.kept.store
    assert [stored.owner for stored in store.rings()] == [OTHER]
    state = store.open_journal().state
    assert state == dataclasses.replace(STATE, persisted=None, **changes)
    with pytest.raises(UserError, match="another history"):
        memory.learn(told())


def test_what_a_former_launch_left_under_its_number_stays(spare):
    with StoreDirectory(spare.root, IDENTITY, PROCESS) as left:
        left.ring(RingRole.OWN, OTHER, RING)
    memory, _ = spare()
    memory.learn(told())
    assert spare.kept.folder == process_folder(spare.root, "run-1", PROCESS + PROCESSES)
    assert [each.name for each in left.folder.glob("*.ring")] == [f"own-{OTHER}.ring"]


def leave(root, process, last, **changes):
    """Leaves the store of a dead process that held slots of a rank until a step."""
    with StoreDirectory(root, IDENTITY, process) as left:
        state = dataclasses.replace(STATE, **{"committed": last, **changes})
        left.journal(JOURNAL).write_state(state)
        ring = left.ring(RingRole.HELD, ONE, RING)
        for step in range(state.persisted.start, last + 1):
            payload = bytes([step]) * 100
            slot = (step - state.persisted.start) % 3
            ring.reserve(step)[:100] = payload
            parts = (SlotPart.of("head", 0, memoryview(payload)),)
            ring.publish(SlotRecord(7, Window(step - slot, 3), slot, step, 100, parts))
    return left.folder


def test_what_a_former_launch_left_is_offered_where_ranks_lack_it(spare):
    older = leave(spare.root, PROCESS, 6)
    newer = leave(spare.root, PROCESS + PROCESSES, 36, persisted=Window(33, 3))
    memory, generation = spare()
    notices = NoticesOfSpares(generation.board, find_spares(generation))
    memory.look()
    assert notices.facts() == ()  # nobody has asked
    generation.board.post(Topic.LEFT, IDENTITY.document())
    memory.look()
    assert notices.look_for_left(IDENTITY) == (PROCESS,)
    (facts,) = notices.facts()
    assert (facts.rank, facts.committed, facts.persisted) == (None, 36, Window(33, 3))
    assert facts.holdings == (
        Holding(ONE, Window(33, 3), 0b111),
        Holding(ONE, Window(36, 3), 0b001),
    )
    assert notices.ledger(PROCESS, range(1, 37)) is not None
    (ring,) = memory._slots._left
    assert [record.step for record in ring.records()] == [33, 34, 35, 36]
    assert (older.exists(), newer.exists()) == (True, False)


def test_a_spare_that_finds_nothing_left_says_so(spare):
    memory, generation = spare()
    generation.board.post(Topic.LEFT, IDENTITY.document())
    memory.look()
    spares = find_spares(generation)
    assert NoticesOfSpares(generation.board, spares).look_for_left(IDENTITY) == ()
    assert spare.kept.store is None


def test_what_was_left_stays_until_a_window_after_it_is_persisted(spare):
    left = leave(spare.root, PROCESS, 6)
    memory, _ = spare()
    memory.learn(told(committed=7, persisted=None))
    memory.look()
    assert left.exists()
    memory.learn(told(first=8, committed=9, persisted=Window(6, 3)))
    memory.look()
    assert left.exists()  # it has a slot of that window
    memory.learn(told(first=10, committed=12, persisted=Window(9, 3)))
    memory.look()
    assert not left.exists()


def test_what_ranks_want_no_more_is_forgotten(spare):
    memory, _ = spare()
    for owner in (ONE, OTHER):
        memory.learn(told(owner))
        store_slots(memory, owner, 3)
    memory, generation = spare()
    memory.look()
    assert len(spare.kept.store.rings()) == 2  # nobody has asked
    notices = NoticesOfSpares(generation.board, find_spares(generation))
    notices.post_wanted({OTHER: (3, PROCESS), ONE: (3, 4)})
    memory.look()
    assert [stored.owner for stored in spare.kept.store.rings()] == [OTHER]


def test_a_spare_that_ranks_do_not_count_forgets_nothing(spare):
    memory, _ = spare()
    memory.learn(told())
    memory, generation = spare()
    generation.board.post(Topic.WANTED, {str(PROCESS + 1): []})
    memory.look()
    assert [stored.owner for stored in spare.kept.store.rings()] == [ONE]


def test_who_sends_copies_in_this_generation_wants_them(spare):
    memory, _ = spare()
    memory.learn(told())
    memory, generation = spare()
    memory.learn(told())
    generation.board.post(Topic.WANTED, {str(PROCESS): []})
    memory.look()
    assert [stored.owner for stored in spare.kept.store.rings()] == [ONE]


def test_more_than_it_may_take_is_refused(spare):
    memory, _ = spare(limit_bytes=JOURNAL.total_bytes + RING.total_bytes + 8192)
    memory.learn(told())
    with pytest.raises(UserError, match="may take"):
        memory.learn(told(OTHER))


@pytest.mark.parametrize("is_over", [True, False])
def test_its_files_go_where_ranks_say_that_all_is_over(spare, is_over):
    memory, generation = spare()
    memory.learn(told())
    if is_over:
        generation.board.post(Topic.OVER, 0)
    memory.end()
    folder = spare.kept.folder
    assert spare.kept.is_over is is_over
    generation.close()
    spare.kept.close()
    assert folder.exists() is not is_over


def test_a_spare_makes_the_memory_of_a_rank_once_ranks_have_posted_how_much_it_is(spare):
    memory, generation = spare()
    memory.look()
    assert spare.kept.store is None
    spare.kept.pin = lambda _: lambda: None
    (found,) = find_spares(generation)
    sizes = ReserveSizes(RING.total_bytes, 4096, copies=3)
    kept = {PROCESS: 2}
    NoticesOfSpares(generation.board, [found]).post_reserve(IDENTITY, sizes, kept)
    memory.look()
    made = spare.kept.reserve
    await_made(made)
    memory.look()
    assert spare.kept.reserve is made
    store = spare.kept.open(spare.root, IDENTITY, PROCESS, ONE)
    assert store.reserve.total_bytes == RING.total_bytes
    assert spare.kept.log_memory.data.nbytes == 4096
    assert store.create_ring(RingRole.OWN, ONE, RING).is_pinned
    assert [each.total_bytes for each in store.reserve_of_copies] == [RING.total_bytes] * 2


def look(memory, kept):
    """Lets a spare look, and waits until it has made what it makes then."""
    memory.look()
    await_made(kept.reserve)


@pytest.mark.parametrize(("rings", "copies", "short"), [(2, None, 3), (4, 1, 1), (5, 2, 0)])
def test_a_spare_makes_no_more_than_it_may_take_and_says_so_once(
    spare, caplog, rings, copies, short
):
    memory, generation = spare(limit_bytes=rings * RING.total_bytes + 4096 + 8192)
    spare.kept.pin = lambda _: lambda: None
    notices = NoticesOfSpares(generation.board, find_spares(generation))
    sizes = ReserveSizes(RING.total_bytes, 4096, copies=3)
    notices.post_reserve(IDENTITY, sizes, {PROCESS: 2})  # which have sent nothing yet
    notices.post_wanted({})
    for _ in range(3):
        look(memory, spare.kept)
    said = [each.getMessage() for each in caplog.records if "in reserve" in each.getMessage()]
    short_bytes = short * RING.total_bytes + (4096 if copies is None else 0)
    assert [
        each.startswith(f"--moevement-host-memory-limit-gb has no room for {short_bytes} of ")
        for each in said
    ] == [True] * (short > 0)
    taken = spare.kept.reserve.take()
    assert len(taken.copies) == (copies or 0)
    assert (taken.ring is None) == (copies is None)
    taken.close()


def test_a_spare_that_found_no_room_tries_again_once_what_was_left_is_removed(spare, monkeypatch):
    memory, generation = spare()
    spare.kept.pin = lambda _: lambda: None
    notices = NoticesOfSpares(generation.board, find_spares(generation))
    sizes = ReserveSizes(RING.total_bytes, 4096)
    notices.post_reserve(IDENTITY, sizes, {})
    with monkeypatch.context() as patched:
        patched.setattr(reserve, "free_bytes", lambda folder: 4096)
        look(memory, spare.kept)
    look(memory, spare.kept)  # ranks may make their files anew
    assert spare.kept.reserve.total_bytes == 0
    notices.post_wanted({})
    look(memory, spare.kept)
    assert spare.kept.reserve.total_bytes == sizes.total_bytes


def test_a_spare_that_found_no_room_tries_again_in_the_next_generation(spare, monkeypatch):
    sizes = ReserveSizes(RING.total_bytes, 4096, copies=1)
    made_bytes = []
    for left_bytes in (4096, RING.total_bytes + 4096, 2 * RING.total_bytes + 4096):
        monkeypatch.setattr(
            reserve,
            "free_bytes",
            lambda folder, left_bytes=left_bytes: left_bytes - sum(made_bytes[-1:]),
        )
        memory, generation = spare()
        spare.kept.pin = lambda _: lambda: None
        notices = NoticesOfSpares(generation.board, find_spares(generation))
        notices.post_reserve(IDENTITY, sizes, {})
        look(memory, spare.kept)
        made_bytes.append(spare.kept.reserve.total_bytes)
    assert made_bytes == [0, RING.total_bytes + 4096, sizes.total_bytes]


def test_what_is_in_reserve_makes_room_for_copies(spare):
    slack_bytes = JOURNAL.total_bytes + 4096 + 8192
    memory, generation = spare(limit_bytes=3 * RING.total_bytes + slack_bytes)
    spare.kept.pin = lambda _: lambda: None
    notices = NoticesOfSpares(generation.board, find_spares(generation))
    sizes = ReserveSizes(RING.total_bytes, 4096, copies=1)
    notices.post_reserve(IDENTITY, sizes, {})
    look(memory, spare.kept)
    memory.learn(told())
    assert spare.kept.reserve.total_bytes == sizes.total_bytes
    memory.learn(told(OTHER))
    assert spare.kept.reserve is None
    notices.post_wanted({ONE: (PROCESS,), OTHER: (PROCESS,)})
    look(memory, spare.kept)
    assert spare.kept.reserve.total_bytes == RING.total_bytes + 4096
    memory.learn(told(LogicalRank(dp=2)))
    look(memory, spare.kept)
    assert spare.kept.reserve.total_bytes == 0
    with pytest.raises(UserError, match="host memory"):
        memory.learn(told(LogicalRank(dp=3)))
