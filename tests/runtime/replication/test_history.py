# SPDX-License-Identifier: Apache-2.0
"""What goes with slots to a process that has no rank, and that nothing else is taken for it."""

import dataclasses

import pytest

from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.peers.ledger_messages import History, OwnHistory
from megatron_moevement.runtime.peers.sender import SlotSender
from megatron_moevement.runtime.slots.journal import JournalShape, JournalState
from megatron_moevement.runtime.transport.wire import ProtocolError
from tests.harness.one_schedule import one_schedule

from .conftest import DEADLINE, IDENTITY, SHAPE, capture, rank_of

JOURNAL = JournalShape(retained_steps=3, entry_bytes=100, last_step=50)
STATE = JournalState(
    rollbacks=7,
    timetable=one_schedule(3, 1),
    committed=6,
    persisted=Window(0, 3, 1),
    rank=rank_of(0),
)
SCHEDULES = {"3 slots": b"slots"}
LOSSES = {1: 1.5, 2: 0.25, 4: -2.0, 5: 0.1, 6: 3.0}


def own_history():
    own = OwnHistory(rank_of(0), IDENTITY, SHAPE, JOURNAL)
    own.begin(STATE, {step: b"entry %d" % step for step in (4, 5, 6)}, lambda: LOSSES, SCHEDULES)
    return own


def commit(own, step):
    own.note(dataclasses.replace(STATE, committed=step), step, b"entry %d" % step, step / 4)


def test_a_peer_is_told_all_once_and_then_what_is_new():
    own = own_history()
    commit(own, 7)
    first = own.after(None)
    assert sorted(first.entries) == [5, 6, 7]  # as many as a journal retains
    assert first.losses == {**LOSSES, 7: 1.75}
    assert (first.state.committed, first.state.rank) == (7, None)
    assert own.after(7).entries == own.after(7).losses == {}
    commit(own, 8)
    news = own.after(7)
    assert news.entries == {8: b"entry 8"}
    assert news.losses == {8: 2.0}


def test_a_peer_is_told_of_schedules_that_it_does_not_know():
    own = own_history()
    assert own.after(None).schedules == SCHEDULES
    assert own.after(6).schedules == {}
    other = {**SCHEDULES, "2 slots": b"other"}
    own.change(other, 7)
    commit(own, 7)
    assert own.after(6).schedules == other
    assert own.after(7).schedules == {}


def test_nothing_is_told_before_anything_is_known():
    assert OwnHistory(rank_of(0), IDENTITY, SHAPE, JOURNAL).after(None) is None


def test_a_history_arrives_as_it_was_sent():
    sent = own_history().after(None)
    sent = dataclasses.replace(sent, losses={1: 1.5, 2: 0.25, 9: -2.0})
    assert History.of_document(sent.document()) == sent


@pytest.mark.parametrize(
    "changes",
    [
        {"owner": 3},
        {"ring": {"capacity": -1, "buffer_bytes": 1, "max_parts": 1}},
        {"journal": {"retained_steps": "3"}},
        {"state": {"era": "x", "timetable": [], "committed": 0, "persisted": None, "rank": None}},
        {"state": {"era": 0, "timetable": [], "committed": 0, "persisted": {"start": "0"}}},
        {"entries": [[1, 2]]},
        {"losses": [[1, "xyzw1234"]]},
        {"losses": 5},
        {"identity": None},
        {"schedules": {"a": "xy"}},
        {"schedules": [1]},
    ],
)
def test_what_is_no_history_breaks_the_protocol(changes):
    with pytest.raises(ProtocolError):
        History.of_document({**own_history().after(None).document(), **changes})


def test_a_spare_is_told_before_it_gets_a_slot_and_others_are_not(job):
    one, spare, other = job(3)
    heard = []
    spare.slots.learn = lambda history: heard.append((history, list(spare.arrived)))
    other.slots.learn = lambda history: heard.append(other)
    addresses = {each.me.process: each.server.address for each in (spare, other)}
    own = own_history()
    with SlotSender(one.me, addresses, deadline=DEADLINE, history=own, spares=[1]) as sender:
        for step in (6, 7):
            commit(own, step)
            record = capture(one.ring, step)
            sent = sender.send(one.owner, record, one.ring.payload(record), [1, 2])
            for outcome in sent.values():
                outcome.result(DEADLINE.total_seconds())
    assert [sorted(history.entries) for history, _ in heard] == [[4, 5, 6], [7]]
    assert [len(arrived) for _, arrived in heard] == [0, 1]
