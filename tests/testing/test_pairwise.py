"""Pairwise covers: every pair occurs, and there are few combinations."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.testing.pairwise import cover_pairs

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
