# SPDX-License-Identifier: Apache-2.0
"""The upstream log keeps what it was given, within its memory, and notices what is damaged."""

import os
import threading
from pathlib import Path

import pytest
import torch

from megatron_moevement.backends.cpu import HostCopyStream
from megatron_moevement.policy.copies.retention import max_log_steps, retain
from megatron_moevement.policy.facts.facts import LogExtent
from megatron_moevement.policy.job.boundary import BoundaryTag, Direction
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.upstream_log import log as module
from megatron_moevement.runtime.upstream_log.log import (
    DamagedLogError,
    LogFullError,
    LogOrderError,
    NotLoggedError,
    UpstreamLog,
    step_bytes,
    tensor_hash,
)
from megatron_moevement.runtime.upstream_log.log_writer import (
    BackgroundWriter,
    InlineWriter,
    LogWriteError,
)

SHAPE = (5, 2, 3)
PER_STEP = 4
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


class GatedStream(HostCopyStream):
    """Copies only once the gate is open, as a busy device would."""

    def __init__(self):
        self.gate = threading.Event()

    def copy(self, source, target):
        assert self.gate.wait(timeout=20)
        super().copy(source, target)


class BrokenStream(HostCopyStream):
    def copy(self, source, target):
        raise RuntimeError("no device any more")


def tag(step, micro_batch, direction=FORWARD):
    sender, receiver = (0, 1) if direction is FORWARD else (1, 0)
    return BoundaryTag(step, direction, sender, receiver, micro_batch)


def content(step, micro_batch, dtype=torch.bfloat16):
    values = torch.arange(torch.Size(SHAPE).numel(), dtype=torch.float32) + 100 * step + micro_batch
    return values.view(SHAPE).to(dtype)


def new_log(max_steps=3, tensors=PER_STEP, dtype=torch.bfloat16):
    return UpstreamLog(max_steps=max_steps, step_bytes=step_bytes(tensors, SHAPE, dtype))


def background(log):
    return BackgroundWriter(log, HostCopyStream())


WRITERS = {"inline": InlineWriter, "background": background}


def write(writer, step, micro_batches=PER_STEP):
    writer.log.begin_step(step)
    for number in range(micro_batches):
        direction = (FORWARD, BACKWARD)[number % 2]
        writer.sent(tag(step, number, direction), content(step, number))
        writer.received(tag(step, 100 + number), content(step, 100 + number))
    writer.log.end_step(step)
    writer.await_landed()


@pytest.mark.parametrize("kind", WRITERS)
def test_what_was_sent_is_served_and_what_came_in_is_known_by_its_hash(kind):
    log = new_log()
    with WRITERS[kind](log) as writer:
        for step in (1, 2, 3):
            write(writer, step)
    for step in (1, 2, 3):
        assert is_whole(log, step)
        for number in range(PER_STEP):
            name = tag(step, number, (FORWARD, BACKWARD)[number % 2])
            served = log.serve(name)
            assert served.dtype is torch.bfloat16
            assert torch.equal(served, content(step, number))
            assert log.sent(step)[name].hash == tensor_hash(content(step, number))
        assert log.received(step) == {
            tag(step, 100 + number): tensor_hash(content(step, 100 + number))
            for number in range(PER_STEP)
        }
    steps = frozenset({1, 2, 3})
    assert log.extents() == (LogExtent(BACKWARD, steps), LogExtent(FORWARD, steps))


def test_type_and_shape_belong_to_a_hash():
    zeros = torch.zeros(4, 2, dtype=torch.bfloat16)
    others = [zeros.view(2, 4), zeros.to(torch.float16), zeros.view(8)]
    assert tensor_hash(zeros) not in [tensor_hash(other) for other in others]
    assert tensor_hash(zeros.t()) == tensor_hash(torch.zeros(2, 4, dtype=torch.bfloat16))


def test_a_source_lives_until_its_copy_has_run():
    log, stream = new_log(), GatedStream()
    with BackgroundWriter(log, stream) as writer:
        log.begin_step(1)
        output = content(1, 0)
        writer.sent(tag(1, 0), output)
        output.data = torch.empty(1, dtype=torch.bfloat16)  # how upstream gives an output up
        log.end_step(1)
        assert not is_whole(log, 1)
        assert log.extents() == (LogExtent(FORWARD, frozenset()),)
        with pytest.raises(NotLoggedError):
            log.serve(tag(1, 0))
        stream.gate.set()
        writer.await_landed()
        assert torch.equal(log.serve(tag(1, 0)), content(1, 0))


def test_a_copy_that_fails_is_told_about():
    log = new_log()
    with BackgroundWriter(log, BrokenStream()) as writer:
        log.begin_step(1)
        writer.sent(tag(1, 0), content(1, 0))
        with pytest.raises(LogWriteError, match="no device any more"):
            writer.await_landed()
        with pytest.raises(LogWriteError):
            writer.sent(tag(1, 1), content(1, 1))
        log.end_step(1)
    assert not is_whole(log, 1)


def is_whole(log, step):
    return all(step in extent.steps for extent in log.extents())


def log_windows(log, window, lag):
    """Logs ten windows, dropping steps as windows are persisted; returns the most ever retained."""
    writer, most = InlineWriter(log), 0
    for step in range(1, 10 * (window + lag)):
        write(writer, step)
        most = max(most, len(log.steps))
        start = (step - lag - window + 1) // window * window
        if start >= 0 and start + window - 1 + lag <= step:
            log.drop_before(retain(Window(start, window), 0).oldest_log_step)
    return most


@pytest.mark.parametrize("lag", [1, 3])
@pytest.mark.parametrize("window", [1, 2, 5])
def test_many_windows_need_as_many_steps_as_the_policy_says_and_no_more(window, lag):
    log = new_log(max_log_steps(window, lag))
    capacity = log.capacity_bytes
    assert log_windows(log, window, lag) == max_log_steps(window, lag)
    assert log.used_bytes <= capacity == log.capacity_bytes
    with pytest.raises(LogFullError, match="no room"):
        log_windows(new_log(max_log_steps(window, lag) - 1), window, lag)


def test_a_flipped_bit_is_never_served():
    log = new_log()
    writer = InlineWriter(log)
    for step in (1, 2):
        write(writer, step)
    log.serve(tag(2, 0)).view(torch.uint8).view(-1)[3] ^= 1
    with pytest.raises(DamagedLogError):
        log.serve(tag(2, 0))
    assert log.extents() == (
        LogExtent(BACKWARD, frozenset({1, 2})),
        LogExtent(FORWARD, frozenset({1})),
    )


def test_nothing_is_read_for_the_facts_until_a_tensor_was_found_damaged(monkeypatch):
    log = new_log()
    writer, read = InlineWriter(log), []
    for step in (1, 2):
        write(writer, step)
    monkeypatch.setattr(module, "tensor_hash", lambda one: read.append(one) or tensor_hash(one))
    log.serve(tag(2, 0)).view(torch.uint8).view(-1)[3] ^= 1
    log.serve(tag(1, 0)).view(torch.uint8).view(-1)[3] ^= 1
    del read[:]
    assert {extent.steps for extent in log.extents()} == {frozenset({1, 2})}
    assert not read
    with pytest.raises(DamagedLogError):
        log.serve(tag(2, 0))
    damaged = log.extents()
    assert damaged[1] == LogExtent(FORWARD, frozenset())
    assert len(read) > 2
    del read[:]
    assert log.extents() == damaged
    with pytest.raises(DamagedLogError):
        log.serve(tag(2, 0))
    assert len(read) == 1
    assert log.extents() == damaged  # nothing new was found
    assert len(read) == 1
    write(writer, 2)
    log.serve(tag(1, 1, BACKWARD)).view(torch.uint8).view(-1)[3] ^= 1
    with pytest.raises(DamagedLogError):
        log.serve(tag(1, 1, BACKWARD))
    assert {extent.steps for extent in log.extents()} == {frozenset({2})}
    assert len(read) > 4


def test_a_step_that_is_run_again_replaces_the_interrupted_one():
    log, stream = new_log(), GatedStream()
    with BackgroundWriter(log, stream) as writer:
        log.begin_step(1)
        writer.sent(tag(1, 0), content(7, 7))  # interrupted here, its copy under way
        log.begin_step(1)
        writer.sent(tag(1, 1), content(1, 1))
        log.end_step(1)
        stream.gate.set()
        writer.await_landed()
    assert log.sent(1).keys() == {tag(1, 1)}
    assert torch.equal(log.serve(tag(1, 1)), content(1, 1))
    assert is_whole(log, 1)


def test_a_name_is_given_once_and_to_an_open_step_only():
    log = new_log()
    writer = InlineWriter(log)
    with pytest.raises(LogOrderError, match="never begun"):
        writer.sent(tag(1, 0), content(1, 0))
    log.begin_step(1)
    writer.sent(tag(1, 0), content(1, 0))
    with pytest.raises(LogOrderError, match="twice"):
        writer.sent(tag(1, 0), content(1, 0))
    log.end_step(1)
    with pytest.raises(LogOrderError, match="is over"):
        writer.sent(tag(1, 1), content(1, 1))


def test_a_step_that_does_not_fit_can_not_be_served_and_the_next_one_can():
    log = new_log(tensors=1)
    writer = InlineWriter(log)
    long = torch.zeros(log.capacity_bytes // 3, 2)
    log.begin_step(1)
    writer.sent(tag(1, 0), content(1, 0))
    writer.sent(tag(1, 1), long)
    log.end_step(1)
    write(writer, 2)
    assert not is_whole(log, 1)
    assert [extent.steps for extent in log.extents()] == [frozenset({2})] * 2


def test_what_was_dropped_is_gone():
    log = new_log()
    writer = InlineWriter(log)
    for step in (1, 2, 3):
        write(writer, step)
    log.drop_before(3)
    assert log.steps == (3,)
    assert log.received(2) == {}
    with pytest.raises(NotLoggedError, match="its steps: 3 to 3"):
        log.serve(tag(2, 0))
    log.clear()
    assert log.used_bytes == 0


def is_mapped(address):
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= address < last:
            return True
    return False


def test_a_fork_does_not_copy_the_memory_of_the_log():
    log = UpstreamLog(max_steps=2, step_bytes=2**22)
    address = log._memory.data.data_ptr()
    assert is_mapped(address)
    child = os.fork()
    if not child:
        os._exit(is_mapped(address))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
