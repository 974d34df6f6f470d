"""The live state of a process that stands still is read part by part, intact or not at all."""

import dataclasses
from datetime import timedelta

import pytest

from megatron_moevement.runtime.peers import server as server_module
from megatron_moevement.runtime.peers.server import ReplicaServer
from megatron_moevement.runtime.peers.state_messages import (
    StatePart,
    checksum_of_document,
    found_document,
)
from megatron_moevement.runtime.peers.state_reader import StateReader, StateReadError
from megatron_moevement.runtime.transport.wire import ProtocolError

DEADLINE = timedelta(seconds=20)
STEP = 7
PAYLOAD = bytes(range(256)) * 40
PART = StatePart(STEP, "head:full")


class Offered:
    """A state of one part."""

    def read(self, step, name):
        if (step, name) == (STEP, PART.name):
            return memoryview(PAYLOAD)
        raise LookupError(f"{name} of step {step} is not here")


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
        reader = StateReader(me, holder.me.process, server.address, deadline=DEADLINE)
        opened.append(reader)
        return reader

    yield open_reader
    for each in reversed(opened):
        each.close()


def test_a_part_arrives_as_often_as_asked(reader_of):
    reader = reader_of(Offered())
    assert reader.take(PART, len(PAYLOAD)) == PAYLOAD
    assert reader.take(PART, len(PAYLOAD)) == PAYLOAD


@pytest.mark.parametrize(
    ("state", "part", "reason"),
    [
        (Offered(), StatePart(STEP - 1, PART.name), "head:full of step 6 is not here"),
        (Offered(), StatePart(STEP, "embedding:full"), "embedding:full of step 7 is not here"),
        (None, PART, "offers no state"),
    ],
)
def test_what_is_not_offered_is_refused(reader_of, state, part, reason):
    with pytest.raises(StateReadError, match=reason):
        reader_of(state).take(part, len(PAYLOAD))


def test_more_bytes_than_expected_are_refused(reader_of):
    with pytest.raises(StateReadError, match="at most 10239 are expected"):
        reader_of(Offered()).take(PART, len(PAYLOAD) - 1)


def test_a_part_that_arrives_damaged_is_refused(reader_of, monkeypatch):
    monkeypatch.setattr(server_module, "checksum_of", lambda payload: 5)
    with pytest.raises(StateReadError, match="head:full from process 0 arrived damaged"):
        reader_of(Offered()).take(PART, len(PAYLOAD))


def test_nobody_reads_in_another_generation(reader_of):
    with pytest.raises(StateReadError, match="process 0 can't be copied"):
        reader_of(Offered(), generation=6)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"step": True, "part": "a"},
        {"step": -1, "part": "a"},
        {"step": 2**48, "part": "a"},
        {"step": 1, "part": 3},
    ],
)
def test_a_request_for_no_part_breaks_the_protocol(document):
    with pytest.raises(ProtocolError, match="no part of a state"):
        StatePart.of_document(document)


def test_an_answer_must_be_of_the_part_that_was_asked_for():
    document = found_document(PART, 2**64 - 1)
    assert checksum_of_document(document, PART) == 2**64 - 1
    with pytest.raises(ProtocolError, match="another part"):
        checksum_of_document(document, StatePart(STEP + 1, PART.name))
    with pytest.raises(ProtocolError, match="no checksum"):
        checksum_of_document({**document, "checksum": "x"}, PART)
