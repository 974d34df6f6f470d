# SPDX-License-Identifier: Apache-2.0
"""Whatever bytes come in, readers and servers fail as they say, and servers go on."""

from collections import Counter
from random import Random

import pytest

from tests.harness.fuzz import _FACTS, fuzz, targets
from tests.harness.fuzz_bytes import as_document, mutated, mutated_document

EXAMPLE = {"a": [1, 2, {"b": "c"}], "d": None}


@pytest.mark.timeout(120)
def test_nothing_fails_in_a_way_that_it_does_not_name(tmp_path):
    counts = Counter()
    with targets(tmp_path) as feeds:
        found = [finding for seed in range(60) for finding in fuzz(seed, feeds, counts)]
    assert found == []
    assert set(counts.values()) == {60}


def test_what_fails_otherwise_is_found_with_its_seed():
    def feed(random):
        if random.random() < 0.5:
            raise KeyError("what the reader does not name")

    found = [one for seed in range(20) for one in fuzz(seed, {"reader": feed}, Counter())]
    assert 2 < len(found) < 18
    assert all("KeyError" in one.failure for one in found)
    again = fuzz(found[-1].seed, {"reader": feed}, Counter())
    assert [one.seed for one in again] == [found[-1].seed]


def test_a_seed_draws_the_same_input_again():
    for seed in range(50):
        drawn = [
            (mutated(one, [b"abc" * 9]), repr(mutated_document(one, EXAMPLE)))
            for one in (Random(seed), Random(seed))
        ]
        assert drawn[0] == drawn[1]
    documents = {repr(mutated_document(Random(seed), _FACTS)) for seed in range(200)}
    assert len(documents) > 100
    assert all(isinstance(as_document(Random(seed), EXAMPLE), dict) for seed in range(50))
