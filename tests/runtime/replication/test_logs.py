# SPDX-License-Identifier: Apache-2.0
"""Logged boundary tensors travel between processes with their hashes, and nothing else does."""

import dataclasses
from datetime import timedelta

import pytest
import torch

from megatron_moevement.policy.job.boundary import BoundaryTag, Direction
from megatron_moevement.runtime.peers.log_messages import (
    TensorHeader,
    hashes_document,
    hashes_of_document,
    step_of_document,
    tag_document,
    tag_of_document,
)
from megatron_moevement.runtime.peers.log_reader import LogReader, LogReadError
from megatron_moevement.runtime.peers.server import ReplicaServer
from megatron_moevement.runtime.transport.wire import ProtocolError
from megatron_moevement.runtime.upstream_log.log import UpstreamLog, tensor_hash

DEADLINE = timedelta(seconds=20)
STEP = 7


def tag_of(micro_batch, step=STEP, direction=Direction.FORWARD):
    return BoundaryTag(step, direction, 0, 1, micro_batch)


def tensor_of(micro_batch, dtype=torch.bfloat16):
    return torch.arange(24).reshape(2, 3, 4).add(100 * micro_batch).to(dtype)


@pytest.fixture
def log():
    """Returns a log of one step of four tensors."""
    log = UpstreamLog(max_steps=2, step_bytes=4096)
    log.begin_step(STEP)
    for micro_batch in range(4):
        tensor = tensor_of(micro_batch)
        place = log.reserve(tag_of(micro_batch), tensor)
        place.copy_(tensor)
        log.land(tag_of(micro_batch), place)
        log.note_received(tag_of(micro_batch, direction=Direction.BACKWARD), 5 + micro_batch)
    log.end_step(STEP)
    return log


@pytest.fixture
def served(job, log):
    """Returns a function that opens a reader of a process that serves the log."""
    holder, reading = job(2)
    opened = []

    def open_reader(log=log, step_bytes=4096, **changes):
        server = ReplicaServer("127.0.0.1", holder.me, holder.slots, deadline=DEADLINE, log=log)
        opened.append(server)
        me = dataclasses.replace(reading.me, **changes)
        peers = {holder.me.process: server.address}
        reader = LogReader(me, peers, deadline=DEADLINE, step_bytes=step_bytes)
        opened.append(reader)
        return reader, holder.me.process

    yield open_reader
    for each in reversed(opened):
        each.close()


def test_tensors_arrive_as_they_were_logged_whether_asked_ahead_or_not(served):
    reader, process = served()
    reader.prefetch(process, [tag_of(one) for one in (0, 1, 2)])
    for micro_batch in (2, 0, 3, 1):
        found = reader.take(process, tag_of(micro_batch))
        assert found.dtype is torch.bfloat16
        assert torch.equal(found, tensor_of(micro_batch))


def test_a_tensor_that_arrives_is_nobody_elses(served, log):
    reader, process = served()
    reader.take(process, tag_of(0)).zero_()
    assert torch.equal(log.serve(tag_of(0)), tensor_of(0))


def test_the_hashes_of_what_was_received_are_told(served):
    reader, process = served()
    backward = Direction.BACKWARD
    expected = {tag_of(one, direction=backward): 5 + one for one in range(4)}
    assert reader.received(process, STEP) == expected
    assert reader.received(process, STEP + 1) == {}


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (tag_of(9), "is not in the upstream log"),
        (tag_of(0, step=STEP + 1), "is not in the upstream log; its steps: 7 to 7"),
    ],
)
def test_what_is_not_logged_is_refused_and_said_so(served, wanted, reason):
    reader, process = served()
    with pytest.raises(LogReadError, match=reason):
        reader.take(process, wanted)


def test_a_tensor_that_does_not_read_as_it_was_logged_is_not_served(served, log):
    reader, process = served()
    log.sent(STEP)[tag_of(1)].data.view(-1)[3] += 1
    with pytest.raises(LogReadError, match="does not read as it was logged"):
        reader.take(process, tag_of(1))


def test_a_tensor_that_is_damaged_on_its_way_is_noticed(served, log, monkeypatch):
    monkeypatch.setattr(log, "logged_hash", lambda tag: tensor_hash(tensor_of(3)))
    reader, process = served()
    with pytest.raises(LogReadError, match="arrived damaged"):
        reader.take(process, tag_of(1))
    with pytest.raises(LogReadError, match="arrived damaged"):  # the replay is over
        reader.take(process, tag_of(3))


def test_nothing_larger_than_expected_is_allocated(served):
    reader, process = served(step_bytes=47)
    with pytest.raises(LogReadError, match="at most 47"):
        reader.take(process, tag_of(0))


def test_a_process_without_a_log_says_so(served):
    reader, process = served(log=None)
    with pytest.raises(LogReadError, match="keeps no upstream log"):
        reader.received(process, STEP)


@pytest.mark.parametrize("changes", [{"token": b"another secret of length"}, {"generation": 6}])
def test_strangers_and_former_generations_get_nothing(served, changes):
    reader, process = served(**changes)
    with pytest.raises(LogReadError):
        reader.take(process, tag_of(0))


def test_what_waits_for_a_peer_that_is_gone_fails_and_so_does_what_comes_after_it(served):
    reader, process = served(token=b"another secret of length")
    reader.prefetch(process, [tag_of(one) for one in range(3)])
    for micro_batch in range(4):
        with pytest.raises(LogReadError, match="does not have the job's token") as failed:
            reader.take(process, tag_of(micro_batch))
        assert str(failed.value).startswith(f"{tag_of(micro_batch)} can't be had from process")
    with pytest.raises(LogReadError, match=f"what was received in step {STEP} can't be had"):
        reader.received(process, STEP)


def test_a_reader_can_be_closed_while_it_is_asked(served):
    reader, process = served()
    reader.prefetch(process, [tag_of(0)] * 50)
    reader.close()
    reader.close()


def test_messages_read_as_they_were_written():
    tag = tag_of(3, direction=Direction.BACKWARD)
    assert tag_of_document(tag_document(tag)) == tag
    assert hashes_of_document(hashes_document({tag: 2**64 - 1})) == {tag: 2**64 - 1}
    header = TensorHeader(torch.float16, (2, 0, 5), 17)
    assert TensorHeader.of_document(header.document()) == header


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"dtype": "float32", "shape": [2], "hash": 17},
        {"dtype": "float32", "shape": [2, -1], "hash": f"{17:016x}"},
        {"dtype": "float32", "shape": [1] * 9, "hash": f"{17:016x}"},
        {"dtype": "float32", "shape": [True], "hash": f"{17:016x}"},
        {"dtype": "int64", "shape": [2], "hash": f"{17:016x}"},
        {"dtype": "float32", "shape": 2, "hash": f"{17:016x}"},
    ],
)
def test_what_describes_no_boundary_tensor_is_refused(document):
    with pytest.raises(ProtocolError):
        TensorHeader.of_document(document)


@pytest.mark.parametrize(
    ("read", "document"),
    [
        (tag_of_document, {"step": 1, "sender": 0, "receiver": 1, "micro_batch": 0}),
        (tag_of_document, {**tag_document(tag_of(0)), "direction": ["forward"]}),
        (tag_of_document, {**tag_document(tag_of(0)), "step": -1}),
        (tag_of_document, {**tag_document(tag_of(0)), "sender": 1.0}),
        (hashes_of_document, {"hashes": [[1, 2, 3]]}),
        (hashes_of_document, {"hashes": [["x", "0" * 16]]}),
        (hashes_of_document, {}),
        (step_of_document, {"step": "1"}),
    ],
)
def test_what_names_nothing_is_refused(read, document):
    with pytest.raises(ProtocolError):
        read(document)
