# SPDX-License-Identifier: Apache-2.0
"""The live state of a process that stands still is read part by part, intact or not at all."""

import dataclasses
from datetime import timedelta

import pytest

from megatron_moevement.runtime.peers import server as server_module
from megatron_moevement.runtime.peers.server import ReplicaServer
from megatron_moevement.runtime.peers.state_messages import (
    StateRange,
    found_document,
    found_of_document,
)
from megatron_moevement.runtime.peers.state_reader import StateReader, StateReadError
from megatron_moevement.runtime.transport.wire import ProtocolError

DEADLINE = timedelta(seconds=20)
STEP = 7
PAYLOAD = bytes(range(256)) * 40
PART = "head:full"
RANGE = StateRange(STEP, PART, 0, len(PAYLOAD))


class Offered:
    """A state of one part."""

    def read(self, step, part, wanted=slice(None)):
        if (step, part) == (STEP, PART):
            return memoryview(PAYLOAD)[wanted], len(PAYLOAD)
        raise LookupError(f"{part} of step {step} is not here")


@pytest.fixture
def reader_of(job):
    """Returns a function that opens a reader of a process that offers a state."""
    holder, reading = job(2)
    opened = []

    def open_reader(state, **changes):
        server = ReplicaServer("127.0.0.1", holder.me, holder.slots, deadline=DEADLINE)
        opened.append(server)
        server.offer(state)
        me = dataclasses.replace(reading.me, **changes)
        reader = StateReader(
            me, holder.me.process, server.address, deadline=DEADLINE, size_bytes=len(PAYLOAD)
        )
        opened.append(reader)
        return reader

    yield open_reader
    for each in reversed(opened):
        each.close()


def test_a_part_arrives_as_often_as_asked(reader_of):
    reader = reader_of(Offered())
    for _ in range(2):
        assert dict(reader.take(STEP, {PART: len(PAYLOAD)})) == {PART: PAYLOAD}


def test_a_part_may_have_fewer_bytes_than_there_is_room_for(reader_of):
    ((_, payload),) = reader_of(Offered()).take(STEP, {PART: 2 * len(PAYLOAD)})
    assert payload == PAYLOAD


@pytest.mark.parametrize(
    ("state", "step", "part", "reason"),
    [
        (Offered(), STEP - 1, PART, "head:full of step 6 is not here"),
        (Offered(), STEP, "embedding:full", "embedding:full of step 7 is not here"),
        (None, STEP, PART, "offers no state"),
    ],
)
def test_what_is_not_offered_is_refused(reader_of, state, step, part, reason):
    with pytest.raises(StateReadError, match=reason):
        list(reader_of(state).take(step, {part: len(PAYLOAD)}))


def test_more_bytes_than_expected_are_refused(reader_of):
    with pytest.raises(StateReadError, match="has 10240 bytes, at most 10239 are expected"):
        list(reader_of(Offered()).take(STEP, {PART: len(PAYLOAD) - 1}))


def test_a_part_that_arrives_damaged_is_refused(reader_of, monkeypatch):
    monkeypatch.setattr(server_module, "checksum_of", lambda payload: 5)
    with pytest.raises(StateReadError, match="head:full from process 0 arrived damaged"):
        list(reader_of(Offered()).take(STEP, {PART: len(PAYLOAD)}))


def test_nobody_reads_in_another_generation(reader_of):
    with pytest.raises(StateReadError, match="a caller of generation 6 in generation 5"):
        list(reader_of(Offered(), generation=6).take(STEP, {PART: len(PAYLOAD)}))


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"step": True, "part": "a", "range": [0, 1]},
        {"step": -1, "part": "a", "range": [0, 1]},
        {"step": 2**48, "part": "a", "range": [0, 1]},
        {"step": 1, "part": 3, "range": [0, 1]},
        {"step": 1, "part": "a"},
        {"step": 1, "part": "a", "range": [0, -1]},
        {"step": 1, "part": "a", "range": [0, 1, 2]},
    ],
)
def test_a_request_for_no_part_breaks_the_protocol(document):
    with pytest.raises(ProtocolError, match="no part of a state"):
        StateRange.of_document(document)


def test_an_answer_must_be_what_was_asked_for():
    document = found_document(RANGE, 5 * len(PAYLOAD), 2**64 - 1)
    assert found_of_document(document, RANGE) == (5 * len(PAYLOAD), 2**64 - 1)
    with pytest.raises(ProtocolError, match="others than"):
        found_of_document(document, dataclasses.replace(RANGE, start=1))
    with pytest.raises(ProtocolError, match="no checksum"):
        found_of_document({**document, "checksum": "x"}, RANGE)
    with pytest.raises(ProtocolError, match="no size of a part"):
        found_of_document({**document, "part_bytes": "x"}, RANGE)
