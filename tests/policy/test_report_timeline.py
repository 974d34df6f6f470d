# SPDX-License-Identifier: Apache-2.0
"""The timeline of a report: lengths that add up, in few numbers, in which no recovery is lost."""

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.accounting.parts import Part, Span
from megatron_moevement.policy.report.timeline import PARTS, encoded

PIECES = st.lists(
    st.tuples(st.integers(1, 400_000), st.sampled_from(Part)), min_size=1, max_size=60
)


def spans(pieces, begun_us=1_000_000_000_000):
    edges = list(accumulate((length for length, _ in pieces), initial=begun_us))
    return [Span(*edge, part) for edge, (_, part) in zip(pairwise(edges), pieces, strict=True)]


def decoded(found):
    """Returns the length and the part of each span, in microseconds."""
    numbers = found["spans"]
    return [
        (length * found["unit_us"], PARTS[part])
        for length, part in zip(numbers[::2], numbers[1::2], strict=True)
    ]


@given(PIECES, st.integers(1, 70))
def test_lengths_add_up_within_a_unit_and_there_are_no_more_than_fit(pieces, limit):
    found = encoded(spans(pieces), limit)
    whole = sum(length for length, _ in pieces)
    kept = decoded(found)
    assert len(kept) <= limit
    assert abs(sum(length for length, _ in kept) - whole) <= found["unit_us"]
    assert all(first is not second for (_, first), (_, second) in pairwise(kept))


@given(PIECES)
def test_where_there_is_room_edges_are_those_of_the_spans_to_the_millisecond(pieces):
    found = encoded(spans(pieces), 1000)
    assert found["unit_us"] == 1000
    ends = set(accumulate(length for length, _ in decoded(found)))
    exact = list(accumulate(length for length, _ in pieces))
    assert all(any(abs(end - one) <= 500 for one in exact) for end in ends)


def test_a_short_recovery_is_not_lost_among_steps():
    steps = [(990_000, Part.USEFUL), (10_000, Part.BETWEEN)] * 300
    struck = [*steps, (1_200, Part.DETECT), (900, Part.REPLAY), *steps]
    found = encoded(spans(struck), 3)
    before, fault, after = decoded(found)
    assert (before[1], fault[1], after[1]) == (Part.USEFUL, Part.DETECT, Part.USEFUL)
    assert found["unit_us"] == 128_000
    assert before[0] == 300_000_000 - 300_000_000 % 128_000
    assert fault[0] == 128_000


def test_a_recovery_is_drawn_before_a_longer_save():
    saved = [(300_000, Part.SAVE), (2_000, Part.DETECT), (300_000, Part.SAVE), (2_000, Part.USEFUL)]
    ((_, part),) = decoded(encoded(spans(saved), 1))
    assert part is Part.DETECT
