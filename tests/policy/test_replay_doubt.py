# SPDX-License-Identifier: Apache-2.0
"""A replay that differed is done again from other copies, until none is left."""

import pytest

from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.facts.facts import (
    Condition,
    Facts,
    Holding,
    LiveState,
    ProcessFacts,
)
from megatron_moevement.policy.job.guarantee import Level
from megatron_moevement.policy.job.ranks import Layout, LogicalRank
from megatron_moevement.policy.job.segments import Ends
from megatron_moevement.policy.outcome.replay_doubt import (
    Consequence,
    Doubt,
    consequence_of,
    doubt_of,
    trusted_copies,
    within,
)
from megatron_moevement.policy.recovery.plan import Origin, Plan, SlotsFetch, StageReplay, Verdict
from megatron_moevement.policy.window.schedule import Window

DEAD = LiveState(Condition.ABSENT)
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
        fetches=tuple(
            SlotsFetch(RANK, RANK, ((WINDOW, 1 << slot),), each)
            for slot, each in enumerate(sources)
        ),
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


LATER = Window(5, 2)


def facts(**holdings):
    """What two ranks' processes hold: `p1` has the rank that is replayed, `p2` another one."""
    ranks = {"p1": RANK, "p2": LogicalRank(dp=1)}
    processes = tuple(
        ProcessFacts(int(name[1:]), name, rank, 6, DEAD, holdings=holdings.get(name, ()))
        for name, rank in ranks.items()
    )
    return Facts(1, Layout(dp=2), Ends.INDEPENDENT, None, processes)


def test_the_next_replay_begins_with_copies_that_were_there_before_and_were_not_tried():
    whole, part = Holding(RANK, WINDOW, 0b11), Holding(RANK, WINDOW, 0b01)
    found = facts(p1=(part,), p2=(whole, Holding(RANK, LATER, 0b10)))
    trusted = trusted_copies(found, plan(Origin.WINDOW, (1, 2), (2,)), RANK)
    assert trusted == {(2, KEYS[0]), (2, KEYS[1]), (2, SlotKey(RANK, LATER, 1))}


def test_what_the_replay_captured_again_is_not_begun_with():
    later = Holding(RANK, LATER, 0b11)
    found = facts(p1=(Holding(RANK, WINDOW, 0b10), later), p2=(Holding(RANK, WINDOW, 0b11),))
    trusted = trusted_copies(found, plan(Origin.WINDOW, (2, 1), (1, 2)), RANK)
    assert trusted == {(2, KEYS[1])}


def test_copies_that_are_not_trusted_are_none_to_load():
    held = (Holding(RANK, WINDOW, 0b11), Holding(RANK, LATER, 0b11))
    other = Holding(LogicalRank(dp=1), WINDOW, 0b11)
    process = facts(p1=(*held, other)).processes[0]
    assert within(process, {}) == process
    trusted = {RANK: frozenset([(1, KEYS[0]), (2, KEYS[1])])}
    assert within(process, trusted).holdings == (Holding(RANK, WINDOW, 0b01), other)
