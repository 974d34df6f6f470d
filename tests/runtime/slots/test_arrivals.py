# SPDX-License-Identifier: Apache-2.0
"""Parts that are checked while they arrive are those that came whole, with the bytes captured."""

import dataclasses
import itertools

from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.slots.arrivals import ArrivingParts
from megatron_moevement.runtime.slots.slot_record import SlotPart, SlotRecord


@st.composite
def payloads(draw):
    """Draws bytes, and a record of parts with gaps between them, in any order."""
    sizes = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=6))
    parts, end = [], 0
    data = bytes(range(1, 1 + sum(gap + size for gap, size in sizes)))
    for number, (gap, size) in enumerate(sizes):
        start = end + gap
        end = start + size
        parts.append(SlotPart.of(f"part {number}", start, memoryview(data)[start:end]))
    shuffled = tuple(draw(st.permutations(parts)))
    return data, SlotRecord(0, Window(0, 1), 0, 0, len(data), shuffled)


@st.composite
def arrivals(draw):
    """Draws a record, a range of its payload that arrives, and where it is cut."""
    data, record = draw(payloads())
    start = draw(st.integers(0, len(data)))
    stop = draw(st.integers(start, len(data)))
    cuts = sorted(draw(st.lists(st.integers(start, stop), max_size=4)))
    return data, record, [start, *cuts, stop]


def arrived(record, data, ends):
    arriving = ArrivingParts(record, ends[0])
    for start, stop in itertools.pairwise(ends):
        arriving.add(memoryview(data)[start:stop])
    return arriving.intact


@given(arrivals())
def test_what_lies_within_the_bytes_that_came_is_intact(drawn):
    data, record, ends = drawn
    intact = arrived(record, data, ends)
    within = {
        part.name
        for part in record.parts
        if ends[0] <= part.offset and part.offset + part.size_bytes <= ends[-1]
    }
    assert intact <= within
    assert all(
        part.name in intact for part in record.parts if part.name in within and part.size_bytes
    )
    assert record.damaged_parts(memoryview(data), intact) == ()


@given(arrivals(), st.data())
def test_a_byte_that_came_as_another_one_leaves_its_part_out(drawn, choice):
    data, record, ends = drawn
    if ends[0] == ends[-1]:
        return
    place = choice.draw(st.integers(ends[0], ends[-1] - 1))
    changed = bytearray(data)
    changed[place] ^= 0xFF
    hit = set(record.names_in(place, place + 1))
    assert not arrived(record, changed, ends) & hit
    assert set(record.damaged_parts(memoryview(changed), arrived(record, changed, ends))) == hit


@given(payloads(), st.integers(0, 20), st.integers(0, 20))
def test_parts_that_overlap_are_never_taken_for_what_they_are_not(drawn, offset, size):
    data, record = drawn
    if offset + size > len(data):
        return
    wrong = SlotPart("over", offset, size, checksum=1)
    record = dataclasses.replace(record, parts=(*record.parts, wrong))
    assert "over" in record.damaged_parts(memoryview(data), arrived(record, data, [0, len(data)]))
