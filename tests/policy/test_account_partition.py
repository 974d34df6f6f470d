# SPDX-License-Identifier: Apache-2.0
"""Each moment of an interval is of exactly one part, whatever is claimed of it."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.accounting.parts import (
    Claim,
    Layer,
    Part,
    partition,
    totals_us,
    within,
)

TIMES = st.integers(0, 40)
CLAIMS = st.lists(
    st.builds(
        lambda layer, one, other, part: Claim(layer, min(one, other), max(one, other), part),
        st.sampled_from(Layer),
        TIMES,
        TIMES,
        st.sampled_from(Part),
    ),
    max_size=12,
)
INTERVALS = st.tuples(TIMES, TIMES).map(sorted)


def part_at(moment, claims):
    """Returns of which part a microsecond is, found by looking at every claim."""
    holding = [claim for claim in claims if claim.start_us <= moment < claim.end_us]
    return [claim.part for claim in holding if claim.layer == max(one.layer for one in holding)]


@given(INTERVALS, CLAIMS)
def test_spans_touch_each_other_and_fill_the_interval(interval, claims):
    start, end = interval
    spans = partition(start, end, claims)
    edges = [start, *(span.end_us for span in spans)]
    assert [span.start_us for span in spans] == edges[:-1]
    assert edges[-1] == end
    assert sum(totals_us(spans).values()) == end - start


@given(INTERVALS, CLAIMS)
def test_each_moment_is_of_a_part_that_is_claimed_most_closely(interval, claims):
    start, end = interval
    for span in partition(start, end, claims):
        for moment in range(span.start_us, span.end_us):
            assert span.part in (part_at(moment, claims) or [Part.UNEXPLAINED])


@given(INTERVALS, CLAIMS, st.randoms())
def test_the_order_of_claims_does_not_matter(interval, claims, random):
    shuffled = list(claims)
    random.shuffle(shuffled)
    assert partition(*interval, shuffled) == partition(*interval, claims)


@given(INTERVALS, INTERVALS, CLAIMS)
def test_a_part_of_the_interval_is_divided_as_the_whole_is(interval, inner, claims):
    spans = within(partition(*interval, claims), *inner)
    start, end = max(interval[0], inner[0]), min(interval[1], inner[1])
    expected = partition(start, end, claims) if start < end else []
    assert totals_us(spans) == totals_us(expected)


def test_what_nobody_claims_is_a_part_of_its_own():
    claims = [Claim(Layer.MEASURED, 2, 5, Part.SAVE)]
    assert totals_us(partition(0, 10, claims)) == {Part.SAVE: 3, Part.UNEXPLAINED: 7}
