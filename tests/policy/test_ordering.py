"""Ordering of operators, and when popularity has changed enough to order anew."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.operators import OperatorId, OperatorKind
from megatron_moevement.policy.ordering import Ordering, decay, must_reorder, order_operators

EXPERTS = [OperatorId(OperatorKind.EXPERT, layer, n) for layer in range(2) for n in range(4)]
GATES = [OperatorId(OperatorKind.GATE, layer) for layer in range(2)]
REST = [OperatorId(OperatorKind.NON_EXPERT, layer) for layer in range(2)]
ENDS = [OperatorId(OperatorKind.EMBEDDING), OperatorId(OperatorKind.HEAD)]
MODEL = [*EXPERTS, *GATES, *REST, *ENDS]
COUNTS = st.fixed_dictionaries({expert: st.integers(0, 5) for expert in EXPERTS})
BY_POPULARITY = [Ordering.HARD, Ordering.SOFT, Ordering.DECAYED]


@given(st.permutations(MODEL))
def test_by_index_experts_come_first_then_gates_then_the_rest(operators):
    assert order_operators(operators, Ordering.INDEX) == tuple(MODEL)


@given(st.permutations(MODEL), COUNTS, st.sampled_from(BY_POPULARITY))
def test_experts_are_ordered_by_ascending_popularity_and_ties_by_index(operators, counts, ordering):
    ordered = order_operators(operators, ordering, counts)
    assert ordered[len(EXPERTS) :] == tuple(MODEL[len(EXPERTS) :])
    assert list(ordered[: len(EXPERTS)]) == sorted(EXPERTS, key=lambda e: (counts[e], e))


def test_experts_without_a_count_were_never_activated():
    ordered = order_operators(EXPERTS[:3], Ordering.HARD, {EXPERTS[0]: 1.0})
    assert ordered == (EXPERTS[1], EXPERTS[2], EXPERTS[0])


def test_index_ignores_popularity():
    assert order_operators(EXPERTS, Ordering.INDEX, {EXPERTS[0]: 9}) == tuple(EXPERTS)


@given(COUNTS, st.fixed_dictionaries({expert: st.integers(1, 4) for expert in EXPERTS}))
def test_with_capacities_the_least_used_experts_come_first(counts, capacities):
    ordered = order_operators(EXPERTS, Ordering.CAPACITY, counts, capacities)
    used = [counts[expert] / capacities[expert] for expert in ordered]
    assert used == sorted(used)


@pytest.mark.parametrize("capacities", [None, {EXPERTS[0]: 0.0}])
def test_every_expert_needs_a_capacity(capacities):
    with pytest.raises(ValueError, match="positive capacity"):
        order_operators(EXPERTS[:1], Ordering.CAPACITY, {}, capacities)


@pytest.mark.parametrize("ordering", list(Ordering))
def test_dense_layers_go_from_back_to_front(ordering):
    ordered = order_operators([*REST, *ENDS], ordering)
    assert [str(operator) for operator in ordered] == [
        "head",
        "layers.1.rest",
        "layers.0.rest",
        "embedding",
    ]


def test_decay_is_the_moving_average_of_the_paper():
    first = decay({}, {EXPERTS[0]: 8}, 0.75)
    second = decay(first, {EXPERTS[0]: 4, EXPERTS[1]: 4}, 0.75)
    assert first == {EXPERTS[0]: 2.0}
    assert second == {EXPERTS[0]: 0.75 * 2.0 + 0.25 * 4, EXPERTS[1]: 1.0}


@pytest.mark.parametrize("alpha", [-0.1, 1.0])
def test_decay_refuses_what_never_learns_or_never_ends(alpha):
    with pytest.raises(ValueError, match="alpha"):
        decay({}, {}, alpha)


FOUR = EXPERTS[:4]


def counts_of(*numbers):
    return dict(zip(FOUR, numbers, strict=True))


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ((100, 100, 100, 100), False),
        ((1000, 1000, 1000, 1000), False),  # more tokens, the same frequencies
        ((110, 90, 100, 100), False),  # by 10 %, not by over 10 %
        ((111, 89, 100, 100), True),  # two of four
        ((120, 100, 90, 90), True),  # one of four is 25 %
        ((100, 100, 100, 0), True),
    ],
)
def test_reorders_when_a_quarter_of_the_experts_changed_by_over_a_tenth(now, expected):
    assert must_reorder(counts_of(100, 100, 100, 100), counts_of(*now)) is expected


def test_fewer_than_a_quarter_of_the_experts_do_not_reorder():
    before = dict.fromkeys([*EXPERTS, OperatorId(OperatorKind.EXPERT, 2, 0)], 1000)
    now = {**before, EXPERTS[0]: 1200, EXPERTS[1]: 800}
    assert len(before) == 9
    assert not must_reorder(before, now)
    assert must_reorder(before, {**now, EXPERTS[2]: 1200})


def test_an_expert_that_wakes_up_has_changed():
    assert must_reorder(counts_of(0, 0, 0, 0), counts_of(1, 0, 0, 0))
    assert must_reorder(counts_of(0, 10, 10, 10), counts_of(1, 10, 10, 10))


def test_nothing_to_order_never_reorders():
    assert not must_reorder({}, {})


@given(COUNTS, COUNTS)
def test_reordering_decides_as_exact_fractions_do(before, now):
    def frequency(counts, expert):
        total = sum(count for other, count in counts.items() if other.layer == expert.layer)
        return Fraction(counts[expert], total) if total else Fraction(0)

    changed = 0
    for expert in EXPERTS:
        old, new = frequency(before, expert), frequency(now, expert)
        silent = not any(now[other] for other in EXPERTS if other.layer == expert.layer)
        changed += not silent and abs(new - old) > old / 10
    assert must_reorder(before, now) is (4 * changed >= len(EXPERTS))
