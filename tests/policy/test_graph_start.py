# SPDX-License-Identifier: Apache-2.0
"""The graphs of a stage's ranks begin in one layer, whatever slots its operators lie in."""

import random

from megatron_moevement.policy.job.graph_start import NO_LAYER, decided, first_layer, vote
from megatron_moevement.policy.job.operators import Inventory, Operator, OperatorId, OperatorKind
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.ordering import Ordering, order_operators
from megatron_moevement.policy.window.window_planner import plan_window

PER_PARAMETER = 12


def named(*names):
    return frozenset(map(OperatorId.parse, names))


def test_the_first_layer_of_a_rank():
    assert first_layer(named("layers.3.experts.1", "layers.2.gate", "head")) == 2
    assert first_layer(named("layers.3.rest", "embedding")) == 0
    assert first_layer(named("head")) == NO_LAYER
    assert first_layer(()) == NO_LAYER


def agreed(ranks):
    """Returns what a stage decides, whose ranks have these frozen and active operators."""
    votes = [vote(frozen, active) for frozen, active in ranks]
    return decided([min(numbers) for numbers in zip(*votes, strict=True)])


def test_a_stage_begins_where_its_first_rank_does():
    ranks = [named("layers.1.experts.0"), (), named("layers.0.experts.3")]
    assert agreed([((), active) for active in ranks]) == (False, 0)
    assert agreed([((), named("head")), (named("layers.2.gate"), ())]) == (True, NO_LAYER)


def draw_shape(draw):
    """Draws one stage of a job with the distributed optimizer.

    Megatron lays the dense parameters of a stage out one behind the other and gives each replica
    an equal piece: so replicas weigh the same operator differently, or not at all.
    """
    ep = draw.choice((2, 4))
    layers, experts = draw.randint(2, 8), ep * draw.randint(1, 4)
    hidden, vocab = draw.choice((32, 64, 128)), draw.choice((100, 1000, 10000))
    dense = {"embedding": vocab * hidden}
    for layer in range(layers):
        dense[f"layers.{layer}.rest"] = 4 * hidden * hidden + 2 * hidden
        dense[f"layers.{layer}.gate"] = experts * hidden
    if draw.random() < 0.5:
        dense["head"] = vocab * hidden + hidden
    expert = 3 * hidden * draw.choice((16, 32, 128))
    total, by_rank = sum(dense.values()), {}
    for rank in range(ep):
        low, high, at, own = rank * total // ep, (rank + 1) * total // ep, 0, []
        for name, size in dense.items():
            share = max(0, min(high, at + size) - max(low, at))
            own.append(Operator(OperatorId.parse(name), PER_PARAMETER * share, 2 * share))
            at += size
        for layer in range(layers):
            for number in range(rank * experts // ep, (rank + 1) * experts // ep):
                operator = OperatorId(OperatorKind.EXPERT, layer, number)
                own.append(Operator(operator, PER_PARAMETER * expert, 2 * expert))
        by_rank[LogicalRank(ep=rank)] = tuple(own)
    return Inventory(by_rank), draw.randint(2, 12)


def starts_in_replay(schedule):
    """Yields for each replayed step the first layers of the ranks, and what they decide."""
    inventory = schedule.inventory
    own = {rank: {one.id for one in inventory.by_rank[rank]} for rank in inventory.ranks}
    active = frozenset()
    for slot in range(schedule.window):
        active |= schedule.full[slot]
        ranks = [(held - active, held & active) for held in own.values()]
        anywhere, start = agreed(ranks)
        assert anywhere == any(frozen for frozen, _ in ranks)
        yield [first_layer(trained) for _, trained in ranks], start


def test_all_ranks_of_a_stage_begin_in_one_layer_where_their_own_starts_differ():
    unlike = 0
    for seed in range(3000):
        inventory, window = draw_shape(random.Random(seed))
        order = order_operators(inventory.operators, Ordering.INDEX)
        schedule = plan_window(inventory, order, window=window).schedule
        differs = False
        for own, start in starts_in_replay(schedule):
            # Nothing that any rank trains lies before the common start.
            assert all(start <= first for first in own)
            assert start in own
            differs |= len(set(own)) > 1
        unlike += differs
    assert unlike > 100  # a decision of each rank alone would stop all of these
