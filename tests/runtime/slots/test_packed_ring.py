# SPDX-License-Identifier: Apache-2.0
"""Slots that lie behind each other: what they overwrite, and what they never do."""

import dataclasses

import pytest

from megatron_moevement.policy.copies.slot_ring import Extent, RingFullError
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.slots.mapped_file import PAGE_BYTES
from megatron_moevement.runtime.slots.ring_file import RingFile, RingShape
from megatron_moevement.runtime.slots.slot_record import EXTRAS, SlotPart, SlotRecord

from .conftest import IDENTITY, OWNER, fill

PACKED = RingShape(9, 3 * PAGE_BYTES, 3, 7 * PAGE_BYTES, PAGE_BYTES, extras_bytes=21)


@pytest.fixture
def packed(shared_memory):
    """Returns a ring whose slots take what they need: seven pages for all."""
    made = RingFile.create(shared_memory / "packed.ring", IDENTITY, OWNER, PACKED)
    yield made
    made.close()


def write(ring, step, pages, **changes):
    """Writes a slot of so many pages; returns its record."""
    room = ring.reserve(step, pages * PAGE_BYTES)
    room[:] = bytes([step]) * len(room)
    part = SlotPart.of("head", 0, room)
    window = changes.pop("window", Window(step - step % 2, 2))
    place = {"rollbacks": 0, "slot": step - window.start, "step": step, **changes}
    return ring.publish(SlotRecord(window=window, payload_bytes=len(room), parts=(part,), **place))


def steps_of(ring):
    return [record.step for record in ring.records()]


def test_where_all_slots_have_equal_room_the_step_says_which(ring):
    for step in (5, 3, 8):
        fill(ring, step, byte=step)
    assert [record.extent for record in ring.records()] == [
        (0, PAGE_BYTES),
        (2 * PAGE_BYTES, PAGE_BYTES),
    ]
    assert steps_of(ring) == [3, 8]


def test_slots_lie_behind_each_other_and_take_the_room_of_the_oldest(packed):
    records = [write(packed, step, pages) for step, pages in ((4, 2), (5, 1), (6, 3))]
    assert [record.extent.offset // PAGE_BYTES for record in records] == [0, 2, 3]
    assert steps_of(packed) == [4, 5, 6]
    assert write(packed, 7, 2).extent == (0, 2 * PAGE_BYTES)  # one page is left at the end
    assert steps_of(packed) == steps_of(RingFile.open(packed.path, IDENTITY)) == [5, 6, 7]
    adopted = RingFile.open(packed.path, IDENTITY)
    assert write(adopted, 8, 2).extent.offset == 2 * PAGE_BYTES
    assert steps_of(adopted) == [7, 8]
    assert all(adopted.damaged_parts(record) == () for record in adopted.records())


def test_a_slot_that_is_needed_is_not_overwritten(packed):
    for step, pages in ((4, 2), (5, 1), (6, 3)):
        write(packed, step, pages)
    with pytest.raises(RingFullError, match="step 7 would take the room of step 4"):
        packed.reserve(7, 2 * PAGE_BYTES, needed=range(4, 7))
    assert steps_of(packed) == [4, 5, 6]
    packed.reserve(7, 2 * PAGE_BYTES, needed=range(5, 7))
    assert steps_of(packed) == [5, 6]
    packed.reserve(
        5, PAGE_BYTES, needed=range(4, 5)
    )  # captured again: what came later is not needed
    assert steps_of(packed) == [6]


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("rollbacks", [0, 1])
def test_a_copy_takes_the_room_of_none_that_stays(packed, stays, rollbacks):
    held = write(packed, 4, 2, window=Window(3, 4))
    beside = {(Window(3, 4), 1)} if stays else {(Window(3, 4, 1), 1), (Window(3, 4), 2)}
    copy = dataclasses.replace(held, slot=3, step=6, rollbacks=rollbacks)
    packed.take(copy, beside)[:] = bytes([6]) * copy.payload_bytes
    if stays and not rollbacks:  # what lies before a rollback is no slot of this history
        assert packed.publish(copy).extent.offset == 2 * PAGE_BYTES
        assert packed.record(4) == held
    else:
        assert packed.publish(copy).extent.offset == 0
        assert packed.record(4) is None


def test_copies_that_stay_move_together_for_one_that_lies_among_them(packed):
    """The others go; what was moved is found by a process that opens the ring."""
    for step, pages in ((3, 1), (4, 2), (5, 1), (6, 2)):
        write(packed, step, pages)
    copy = dataclasses.replace(packed.record(6), step=7, slot=1, extent=Extent(0, 2 * PAGE_BYTES))
    beside = {(Window(4, 2), 0), (Window(6, 2), 0)}
    room = packed.take(copy, beside)
    assert room.nbytes == 2 * PAGE_BYTES
    adopted = RingFile.open(packed.path, IDENTITY)
    assert [(each.step, each.extent.offset // PAGE_BYTES) for each in adopted.records()] == [
        (4, 0),
        (6, 2),
    ]
    assert [adopted.damaged_parts(record) for record in adopted.records()] == [(), ()]
    room[:] = bytes([6]) * room.nbytes
    assert packed.publish(copy).extent == (4 * PAGE_BYTES, 2 * PAGE_BYTES)
    assert steps_of(packed) == [4, 6, 7]


def test_a_copy_that_was_found_damaged_does_not_stay_nor_pass_for_an_intact_one(packed):
    held = write(packed, 4, 2)
    packed.payload(held)[0] ^= 1
    assert packed.damaged_parts(held) == ("head",)
    copy = dataclasses.replace(held, step=5, slot=1)
    packed.take(copy, {(held.window, 0)})
    assert packed.record(4) is None
    damaged, intact = write(packed, 5, 2), write(packed, 6, 2)
    packed.payload(damaged)[0] ^= 1
    packed.damaged_parts(damaged)
    beside = {(one.window, one.slot) for one in (damaged, intact)}
    packed.take(dataclasses.replace(intact, step=7, slot=intact.slot + 1), beside)
    assert steps_of(packed) == [6]


def test_parts_of_a_copy_have_one_room(packed):
    held = write(packed, 4, 2)
    copy = dataclasses.replace(held, step=5, slot=1)
    first = packed.take(copy, {(held.window, 0)})
    first[:] = bytes(range(256)) * (first.nbytes // 256)
    again = packed.take(copy)  # by now nothing has to stay
    assert again == first
    assert packed.record(4) == held


def test_where_those_that_stay_leave_no_room_a_copy_is_not_accepted(packed):
    for step in (4, 5):
        held = write(packed, step, 3)
    copy = dataclasses.replace(held, window=Window(6, 2), step=6, slot=0)
    assert packed.take(copy, {(held.window, 0), (held.window, 1)}) is None
    assert steps_of(packed) == [4, 5]


@pytest.mark.parametrize("extent", [(5, 3), (6, 2), (0, 0)])
def test_a_slot_that_lies_nowhere_is_not_accepted(packed, extent):
    held = write(packed, 4, 2)
    pages = Extent(*(PAGE_BYTES * each for each in extent))
    assert packed.take(dataclasses.replace(held, step=5, slot=1, extent=pages)) is None
    odd = Extent(1, held.extent.size_bytes)
    assert packed.take(dataclasses.replace(held, step=5, slot=1, extent=odd)) is None


def test_a_slot_out_of_another_ring_takes_the_room_of_none_that_is_needed(packed):
    held = write(packed, 6, 2)
    lacking = dataclasses.replace(held, window=Window(4, 1), slot=0, step=4)
    place(packed, packed.get(lacking, needed={6}), lacking)
    assert packed.record(4).extent.offset == 5 * PAGE_BYTES  # in front of it, at the end
    assert packed.record(6) == held
    place(packed, packed.get(lacking, needed={5}), lacking)
    assert packed.record(4).extent == held.extent
    assert packed.record(6) is None


def test_where_what_is_needed_leaves_no_room_a_slot_out_of_another_ring_takes_none(packed):
    for step, pages in ((4, 3), (5, 3)):
        held = write(packed, step, pages)
    lacking = dataclasses.replace(held, window=Window(6, 1), slot=0, step=6)
    with pytest.raises(RingFullError, match="step 6 would take the room of step 4"):
        packed.get(lacking, needed={4, 5})
    assert steps_of(packed) == [4, 5]


def place(ring, room, record):
    """Publishes a slot out of another ring."""
    assert room.nbytes == record.payload_bytes
    ring.publish(record)


def test_a_slot_before_all_others_lies_in_front_of_them(packed):
    for step, pages in ((6, 1), (7, 2)):
        write(packed, step, pages)
    assert write(packed, 5, 3).extent.offset == 4 * PAGE_BYTES  # at the end: the first one is at 0
    assert write(packed, 4, 1).extent.offset == 3 * PAGE_BYTES
    assert steps_of(packed) == [4, 5, 6, 7]


def test_an_empty_ring_has_room_for_slots_that_take_no_more_than_all_of_it(packed):
    one = write(packed, 0, 3)
    assert PACKED.has_room_for_all([one, one])
    assert not PACKED.has_room_for_all([one] * 3)
    small = dataclasses.replace(one, payload_bytes=9, parts=())
    assert not PACKED.has_room_for_all([small] * 8)
    assert not dataclasses.replace(PACKED, capacity=1).has_room_for_all([one, one])
    # Captured where extras are larger, it is larger than the room that it would have here.
    extras = SlotPart(EXTRAS, 0, PAGE_BYTES + 1, 0)
    assert not PACKED.has_room_for_all(
        [dataclasses.replace(one, payload_bytes=PAGE_BYTES + 1, parts=(extras,))]
    )
