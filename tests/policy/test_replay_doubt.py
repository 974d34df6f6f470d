"""A replay that differed is done again from other copies, until none is left."""

import pytest

from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.facts.facts import Holding
from megatron_moevement.policy.job.guarantee import Level
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.outcome.replay_doubt import (
    Consequence,
    Doubt,
    consequence_of,
    doubt_of,
    without,
)
from megatron_moevement.policy.recovery.plan import Origin, Plan, SlotFetch, StageReplay, Verdict
from megatron_moevement.policy.window.schedule import Window

RANK, WINDOW = LogicalRank(), Window(3, 2)
KEYS = [SlotKey(RANK, WINDOW, slot) for slot in range(2)]


def plan(origin, *sources):
    return Plan(
        1,
        Verdict.GLOBAL,
        "",
        6,
        window=WINDOW,
        replays=(StageReplay(0, 3, origin),),
        fetches=tuple(map(SlotFetch, [RANK] * 2, KEYS, sources)),
    )


def test_only_what_has_another_copy_is_doubted():
    found = doubt_of(plan(Origin.WINDOW, (1, 2), (2,)), RANK)
    assert found.sources == {KEYS[0]: 1, KEYS[1]: 2}
    assert found.replaceable == {KEYS[0]: 1}
    assert found.may_be_mended


def test_what_an_interrupted_replay_left_is_replaced_by_the_window():
    found = doubt_of(plan(Origin.KEPT), RANK)
    assert found.may_be_mended
    assert not found.replaceable


def test_another_attempt_would_load_the_same_checkpoint():
    assert not doubt_of(plan(Origin.DURABLE), RANK).may_be_mended


def test_with_the_only_copy_there_is_no_other_attempt():
    found = doubt_of(plan(Origin.WINDOW, (1,), (1,)), RANK)
    assert not found.may_be_mended


@pytest.mark.parametrize(
    ("level", "others", "expected"),
    [
        (Level.EXACT, [True, False], Consequence.AGAIN),
        (Level.EXACT, [False], Consequence.STOP),
        (Level.EXACT, [], Consequence.GO_ON),
        (Level.CONSISTENT, [False, True], Consequence.GO_ON),
    ],
)
def test_what_follows(level, others, expected):
    doubts = [Doubt({KEYS[0]: 1}, {KEYS[0]: frozenset([2] * has)}) for has in others]
    assert consequence_of(level, doubts) is expected


def test_doubted_slots_are_none_to_load():
    held = [Holding(RANK, WINDOW, 0b11), Holding(RANK, Window(5, 2), 0b11)]
    assert without(held, [KEYS[1]]) == (Holding(RANK, WINDOW, 0b01), held[1])
    assert without(held, KEYS) == (held[1],)
    assert without(held, []) == tuple(held)
