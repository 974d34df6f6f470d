# SPDX-License-Identifier: Apache-2.0
"""The ring of slots: it holds what it must, overwrites nothing, and is full when it has to be."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.copies.slot_ring import (
    Extent,
    RingFullError,
    SlotRing,
    extent_of,
    moved_together,
    place_of,
    ring_bytes,
    ring_capacity,
)
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.recovery.plan import RankPlan, SlotFetch
from megatron_moevement.policy.recovery.slot_choice import fetches_in_order, held_steps
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.policy.window.slot_room import RankRoom, SlotRoom, least_after
from megatron_moevement.policy.window.timetable import Timetable, TimetableEntry

LONGEST = 8
ROOM = RankRoom(
    {
        used: SlotRoom(slot, window)
        for used, (slot, window) in enumerate(
            ((20, 20), (13, 24), (10, 27), (9, 30), (8, 34), (7, 37), (6, 40), (6, 44)), 1
        )
    }
)


@st.composite
def windows_in_turn(draw):
    """Draws the sizes of the slots of windows, each of a W that may follow the one before it."""
    found, used = [], draw(st.integers(1, LONGEST))
    for _ in range(draw(st.integers(4, 12))):
        own = ROOM.of(used)
        sizes = st.lists(st.integers(1, own.slot_bytes), min_size=used, max_size=used)
        full = [
            own.window_bytes * (n + 1) // used - own.window_bytes * n // used for n in range(used)
        ]
        found.append(draw((st.permutations(full) | sizes).filter(own.holds)))
        used = draw(st.integers(least_after(used), LONGEST))
    return found


def test_capacity_is_two_windows_and_the_lag():
    assert ring_capacity(3, 2) == 8


@pytest.mark.parametrize(("window", "lag"), [(0, 1), (1, -1)])
def test_impossible_rings_are_refused(window, lag):
    with pytest.raises(ValueError, match="no ring"):
        ring_capacity(window, lag)


def changing(windows):
    """A timetable whose every window has another schedule, of the W that is drawn for it."""
    entries, start = [], 3
    for version, window in enumerate(windows):
        entries.append(TimetableEntry(version, start, window, str(version)))
        start += window
    return Timetable(tuple(entries))


@given(windows_in_turn(), st.integers(1, 2), st.data())
def test_no_two_slots_that_are_needed_share_a_byte_however_windows_change(windows, lag, data):
    """Captures as a job does: a window is dropped once the one after it is persisted, or later.

    At times another process takes the rank's place, or the same one lacks some. What nobody has
    comes from a replica; other slots come from processes that have them where they lay before.
    """
    timetable, sizes = changing(map(len, windows)), [size for window in windows for size in window]
    ring = SlotRing(ring_capacity(LONGEST, lag), lag, 3, 3)
    extents: dict[int, Extent] = {}
    room_bytes = ring_bytes(ROOM, lag)
    while ring.next_step - 3 < len(sizes) - LONGEST:
        oldest = timetable.window_of(ring.oldest)
        later = timetable.window_of(oldest.last + 1)
        is_complete = ring.next_step > later.last
        is_full = ring.is_full(timetable)
        assert is_full == (ring.next_step > later.last + lag)
        if is_complete and (is_full or data.draw(st.booleans(), label="persisted")):
            ring = ring.dropped_before(later.start)
            continue
        if ring.steps and data.draw(st.booleans(), label="lost"):
            extents = fetched(ring.steps, extents, sizes, room_bytes, data)
        place(ring.next_step, sizes, extents, ring.steps, room_bytes)
        ring = ring.captured()


def lie_apart(sizes, start, room_bytes):
    """Returns whether slots that are all needed have no byte in common, wherever the first lies."""
    extents = {-1: Extent(start, 0)}
    for step, size in enumerate(sizes):
        extents[step] = extent_of(step, size, extents, room_bytes)
    return not any(
        one.overlaps(other) for one, other in itertools.combinations(extents.values(), 2)
    )


def least_bytes(sizes):
    """Returns the smallest ring that slots which are all needed fit into, wherever they begin."""
    rings = itertools.count(sum(sizes))
    return next(r for r in rings if all(lie_apart(sizes, start, r) for start in range(r)))


def held_at_a_time(room):
    """Yields the sizes of what a ring may have to hold: two windows and a slot of a third one."""
    for three in itertools.product(room.by_used, repeat=3):
        if all(then >= least_after(used) for used, then in itertools.pairwise(three)):
            first, then, last = map(room.of, three)
            yield [first.slot_bytes] * three[0] + [then.slot_bytes] * three[1] + [last.slot_bytes]


@pytest.mark.parametrize("sizes", [(20,), (20, 12), (20, 12, 10, 9), (20, 13, 11, 9, 8, 8, 7, 7)])
def test_a_ring_is_as_large_as_the_windows_that_may_follow_each_other_need(sizes):
    room = RankRoom({used: SlotRoom(size, used * size) for used, size in enumerate(sizes, 1)})
    assert max(map(least_bytes, held_at_a_time(room))) == ring_bytes(room, 1) - 1


def test_a_ring_has_no_room_for_a_slot_of_a_w_that_shrinks_at_once():
    sizes = [5, 6, 5, 6, 5, 6, 5, 6]
    assert ROOM.of(8).holds(sizes)
    assert not lie_apart([*sizes, *sizes, ROOM.of(1).slot_bytes], 0, ring_bytes(ROOM, 1))


def place(step, sizes, extents, needed, room_bytes):
    """Captures a slot, which takes the room of none that is needed."""
    extent = extent_of(step, sizes[step - 3], extents, room_bytes)
    put(step, extent, extents, needed, room_bytes)


def put(step, extent, extents, needed, room_bytes):
    there = [other for other in needed if other in extents]
    assert not any(extent.overlaps(extents[other]) for other in there)
    assert 0 <= extent.offset <= extent.stop <= room_bytes
    extents[step] = extent


def fetched(steps, former, sizes, room_bytes, data):
    """Returns where slots lie in a ring that had some of them, and got the others as planned."""
    rank, replica, some = LogicalRank(), LogicalRank(dp=1), st.sets(st.sampled_from(steps))
    there, of_replica = data.draw(some, label="there"), data.draw(some, label="of a replica")
    before = other_layout(steps, sizes, room_bytes, data.draw(st.integers(0, room_bytes)))
    lain_otherwise = data.draw(some, label="as they lay before")
    fetches = tuple(
        SlotFetch(
            rank,
            SlotKey(replica if step in of_replica - there else rank, Window(step, 1), 0),
            (0 if step in there else 1,),
        )
        for step in steps
    )
    plan = RankPlan(rank, 0, None, False, None, fetches, (), steps[0], steps[-1] + 1, None)
    held = held_steps(plan, 0, lambda key: True)
    assert held == there
    extents = {step: former[step] for step in held}
    for fetch in fetches_in_order(plan, held):
        step, size = fetch.slot.step, sizes[fetch.slot.step - 3]
        lay = (before if step in lain_otherwise else former)[step]
        known = lay if fetch.slot.owner == rank else None
        put(step, place_of(step, size, known, extents, room_bytes), extents, steps, room_bytes)
    assert extents.keys() == set(steps)
    if not there | of_replica | lain_otherwise:
        assert extents == {step: former[step] for step in steps}
    return extents


def other_layout(steps, sizes, room_bytes, start):
    """Returns where slots lie whose first one lies elsewhere."""
    extents = {steps[0] - 1: Extent(start, 0)}
    for step in steps:
        extents[step] = extent_of(step, sizes[step - 3], extents, room_bytes)
    return extents


def test_a_slot_lies_behind_the_newest_before_it_or_in_front_of_the_oldest_after_it():
    extents = {4: Extent(10, 5), 9: Extent(40, 20)}
    assert extent_of(5, 3, extents, 100) == (15, 3)
    assert extent_of(9, 30, extents, 100) == (15, 30)
    assert extent_of(10, 41, extents, 100) == (0, 41)
    assert extent_of(3, 100, extents, 100) == (0, 100)
    assert extent_of(3, 8, extents, 100) == (2, 8)
    assert extent_of(3, 11, extents, 100) == (89, 11)
    assert extent_of(3, 11, {}, 100) == (0, 11)
    with pytest.raises(RingFullError, match="101 bytes in a ring of 100"):
        extent_of(3, 101, extents, 100)


def test_a_slot_lies_where_it_lay_unless_its_neighbours_lie_otherwise():
    extents = {4: Extent(10, 5), 9: Extent(40, 20)}
    assert place_of(5, 3, Extent(15, 3), extents, 100) == (15, 3)
    assert place_of(5, 3, Extent(18, 3), extents, 100) == (15, 3)  # it would leave a gap
    assert place_of(8, 25, Extent(15, 25), extents, 100) == (15, 25)
    assert place_of(8, 3, Extent(15, 3), extents, 100) == (15, 3)  # it would, but where else
    assert place_of(10, 40, Extent(60, 40), extents, 100) == (60, 40)
    assert place_of(10, 41, Extent(59, 41), extents, 100) == (0, 41)
    assert place_of(10, 5, Extent(0, 5), extents, 100) == (60, 5)
    assert place_of(3, 8, Extent(2, 8), extents, 100) == (2, 8)
    assert place_of(3, 8, Extent(92, 8), extents, 100) == (2, 8)
    assert place_of(3, 11, Extent(89, 11), extents, 100) == (89, 11)
    assert place_of(3, 11, Extent(70, 11), {}, 100) == (70, 11)
    assert place_of(3, 11, Extent(90, 11), {}, 100) == (0, 11)  # of a larger ring
    assert place_of(3, 11, None, {}, 100) == (0, 11)


@given(st.data())
def test_all_that_lie_in_a_ring_have_room_beside_each_other_in_another_one(data):
    """However they lie there: in a ring of copies that has another layout."""
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6), label="sizes")
    room_bytes = sum(sizes) + data.draw(st.integers(0, 9), label="rest")
    own = data.draw(scattered(sizes, room_bytes), label="own")
    newest = len(sizes) - 1
    held = data.draw(scattered(sizes[:newest], room_bytes), label="held")
    moved, copy = moved_together(own[newest], held, room_bytes)
    lie = [*moved.values(), copy]
    assert not any(each.overlaps(other) for each in lie for other in lie if other is not each)
    assert max(each.stop for each in lie) <= room_bytes
    assert [each.size_bytes for _, each in sorted(moved.items())] == sizes[:newest]
    assert copy.size_bytes == sizes[newest]
    # So they can be moved in this order: none over one that is still to be moved.
    assert list(moved.values()) == sorted(moved.values())
    assert sorted(held, key=held.__getitem__) == list(moved)
    assert all(moved[step].offset <= held[step].offset for step in held)


@st.composite
def scattered(draw, sizes, room_bytes):
    """Draws where slots of these sizes lie, in any order and with gaps."""
    gaps = [draw(st.integers(0, 9)) for _ in sizes]
    left, stop, extents = room_bytes - sum(sizes), 0, {}
    for step, gap in zip(draw(st.permutations(range(len(sizes)))), gaps, strict=True):
        kept = min(gap, left)
        extents[step] = Extent(stop + kept, sizes[step])
        left, stop = left - kept, extents[step].stop
    return extents


def test_a_ring_that_is_too_small_for_all_takes_no_copy():
    with pytest.raises(RingFullError, match="a slot of 3 bytes behind 8 of 10"):
        moved_together(Extent(0, 3), {4: Extent(1, 5), 5: Extent(7, 3)}, 10)


@given(st.integers(1, 6), st.integers(0, 4), st.integers(1, 5))
def test_training_never_waits_while_acknowledgements_keep_to_the_lag(window, lag, num_windows):
    ring = SlotRing(ring_capacity(window, lag), lag)
    timetable = Timetable((TimetableEntry(0, 0, window, "d"),))
    for step in range(num_windows * window + lag):
        assert not ring.is_full(timetable)
        ring = ring.captured()
        complete = step - (window - 1) - lag  # first step of the window persisted now
        if complete >= 0 and complete % window == 0:
            ring = ring.dropped_before(complete)


def test_a_ring_takes_no_more_slots_than_it_has_descriptors():
    ring = SlotRing(3, 1, 4, 7)
    with pytest.raises(RingFullError, match="step 7"):
        ring.captured()
    assert ring.dropped_before(5).captured().steps == range(5, 8)


@pytest.mark.parametrize(("oldest", "next_step"), [(1, 0), (0, 5)])
def test_a_ring_holds_no_more_than_it_has_room_for(oldest, next_step):
    with pytest.raises(ValueError, match="can't hold"):
        SlotRing(4, 1, oldest=oldest, next_step=next_step)
