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


@pytest.mark.parametrize(
    ("changes", "accepted"),
    [({}, False), ({"rollbacks": 1}, True), ({"window": Window(6, 1)}, True), ({"step": 3}, True)],
)
def test_a_slot_takes_the_room_of_no_older_one_of_its_window(packed, changes, accepted):
    held = write(packed, 4, 2, window=Window(3, 4))
    place = {"step": 6, "window": held.window, **changes}
    slot = place["step"] - place["window"].start
    room = packed.take(dataclasses.replace(held, slot=slot, **place))
    assert (room is not None) == accepted
    assert (packed.record(4) == held) == (not accepted)


def test_a_slot_takes_the_room_of_an_older_one_of_its_window_that_is_damaged(packed):
    held = write(packed, 4, 2, window=Window(3, 4))
    packed.payload(held)[0] ^= 1
    assert packed.damaged_parts(held)
    assert packed.take(dataclasses.replace(held, slot=3, step=6)) is not None


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
