# SPDX-License-Identifier: Apache-2.0
"""Pairwise covers: every pair occurs, and there are few combinations."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.pairwise import Ties, cover_pairs, pairs_of

FACTORS = st.lists(st.integers(1, 4), min_size=2, max_size=5).map(
    lambda sizes: {
        f"factor{number}": [f"level{level}" for level in range(size)]
        for number, size in enumerate(sizes)
    }
)


@given(FACTORS)
def test_every_two_levels_of_two_factors_occur_together(factors):
    rows = cover_pairs(factors)
    for one, other in itertools.combinations(factors, 2):
        together = {(row[one], row[other]) for row in rows}
        assert together == set(itertools.product(factors[one], factors[other]))


@given(FACTORS)
def test_every_combination_has_one_level_of_each_factor_and_brings_a_pair(factors):
    rows = cover_pairs(factors)
    for row in rows:
        assert list(row) == list(factors)
        assert all(level in factors[name] for name, level in row.items())
    pairs = [set(itertools.combinations(row.items(), 2)) for row in rows]
    for number, own in enumerate(pairs):
        assert own - set().union(*pairs[:number])


def test_a_cover_is_much_smaller_than_the_product():
    factors = {f"factor{n}": ["a", "b", "c"] for n in range(8)}
    assert len(cover_pairs(factors)) <= 20


def test_the_same_factors_give_the_same_cover():
    factors = {"a": ["1", "2"], "b": ["3", "4", "5"], "c": ["6"]}
    assert cover_pairs(factors) == cover_pairs(factors)


@given(FACTORS, st.data())
def test_impossible_pairs_never_occur_and_all_others_do(factors, data):
    # With the first level of each factor any row can be completed.
    pairs = [pair for pair in pairs_of(factors) if all(level != "level0" for _, level in pair)]
    impossible = data.draw(st.sets(st.sampled_from(pairs)) if pairs else st.just(set()))
    rows = cover_pairs(factors, impossible, data.draw(st.sampled_from(Ties)))
    seen = {pair for row in rows for pair in itertools.combinations(row.items(), 2)}
    assert set(pairs_of(factors)) - seen == impossible


def test_a_pair_that_nothing_goes_with_is_refused():
    factors = {"a": ["1"], "b": ["2"], "c": ["3"]}
    with pytest.raises(ValueError, match="no level of c goes with"):
        cover_pairs(factors, [(("b", "2"), ("c", "3"))])


def test_levels_that_no_pair_needs_are_used_alike():
    factors = {"a": list("1234567"), "b": list("1234567"), "c": ["1", "2"]}
    counts = Counter(row["c"] for row in cover_pairs(factors, ties=Ties.RAREST))
    assert abs(counts["1"] - counts["2"]) <= 1
    counts = Counter(row["c"] for row in cover_pairs(factors))
    assert counts["1"] - counts["2"] > 1
