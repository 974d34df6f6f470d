# SPDX-License-Identifier: Apache-2.0
"""The log of a device that computes and copies beside the host: order, buffers, bounded memory."""

import contextlib
import threading
import weakref
from datetime import timedelta

import numpy as np
import pytest
import torch

from megatron_moevement.policy.job.boundary import BoundaryTag, Direction
from megatron_moevement.runtime.capture.background import Background
from megatron_moevement.runtime.upstream_log import log_writer
from megatron_moevement.runtime.upstream_log.log import UpstreamLog, step_bytes, tensor_hash
from megatron_moevement.runtime.upstream_log.log_writer import BackgroundWriter, LogWriteError
from tests.harness.slow_device import SlowDevice

pytestmark = pytest.mark.timeout(30)

ELEMENTS = 4096
TENSORS = 40


def tag(number):
    return BoundaryTag(1, Direction.FORWARD, 0, 1, number)


class Memory:
    """Makes sources and counts those that are alive."""

    def __init__(self):
        self.alive_bytes = self.peak_bytes = 0
        self.freed = threading.Semaphore(0)

    def source(self, number):
        array = np.full(ELEMENTS, number, dtype=np.float32)
        weakref.finalize(array, self._free, array.nbytes)
        self.alive_bytes += array.nbytes
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)
        return torch.from_numpy(array)

    def _free(self, size_bytes):
        self.alive_bytes -= size_bytes
        self.freed.release()


@contextlib.contextmanager
def writing(device):
    """Yields a writer on a device, its log open for one step."""
    log = UpstreamLog(max_steps=1, step_bytes=step_bytes(TENSORS, (ELEMENTS,), torch.float32))
    with device, BackgroundWriter(log, device.copy_stream()) as writer:
        log.begin_step(1)
        yield writer


@pytest.fixture
def slow_hash(monkeypatch):
    """Lets the hash of what came in begin when the gate is open."""
    gate = threading.Event()

    def hashed(tensor):
        gate.wait()
        return tensor_hash(tensor)

    monkeypatch.setattr(log_writer, "tensor_hash", hashed)
    return gate


def expected(number):
    return torch.full((ELEMENTS,), float(number))


def test_no_more_memory_of_the_device_is_held_than_the_bound(monkeypatch):
    source_bytes = 4 * ELEMENTS
    monkeypatch.setattr(BackgroundWriter, "MAX_HELD_BYTES", 3 * source_bytes)
    memory = Memory()
    with writing(SlowDevice(latency_s=0.001, bytes_per_s=1e8)) as writer:
        for number in range(TENSORS):
            hand_over = writer.sent if number % 2 else writer.received
            hand_over(tag(number), memory.source(number))
        writer.await_landed()
        assert memory.alive_bytes <= source_bytes  # as the last piece is being let go
    assert source_bytes < memory.peak_bytes <= 5 * source_bytes
    assert all(torch.equal(writer.log.serve(tag(one)), expected(one)) for one in (1, 3, 39))
    assert writer.log.received(1)[tag(38)] == tensor_hash(expected(38))


def test_a_tensor_larger_than_the_bound_is_logged_alone(monkeypatch):
    monkeypatch.setattr(BackgroundWriter, "MAX_HELD_BYTES", 1)
    with writing(SlowDevice()) as writer:
        for number in range(3):
            writer.sent(tag(number), expected(number))
        writer.await_landed()
        assert torch.equal(writer.log.serve(tag(2)), expected(2))


def test_a_wait_for_room_counts_as_a_wait_for_the_log(monkeypatch):
    await_that = Background.await_that

    def a_second(self, holds):
        await_that(self, holds)
        return timedelta(seconds=1)

    monkeypatch.setattr(Background, "await_that", a_second)
    with writing(SlowDevice()) as writer:
        for number in range(3):
            writer.sent(tag(number), expected(number))
        copied_and_hashed = timedelta(seconds=2)
        assert writer.await_landed() == timedelta(seconds=3) + copied_and_hashed
        assert writer.await_landed() == copied_and_hashed


def test_a_copy_waits_for_the_computation_of_its_source_and_for_no_later_one():
    first, later = threading.Event(), threading.Event()
    with writing(SlowDevice()) as writer:
        device = writer._stream._device
        source = torch.zeros(ELEMENTS)
        device.compute(first.wait)
        device.compute(lambda: source.fill_(7.0))
        writer.sent(tag(0), torch.zeros(ELEMENTS))
        writer.sent(tag(1), source)
        device.compute(later.wait)
        writer.sent(tag(2), torch.zeros(ELEMENTS))
        first.set()
        while writer.log.sent(1).keys() != {tag(0), tag(1)}:  # for ever, if it waits for `later`
            threading.Event().wait(0.001)
        later.set()
        writer.await_landed()
        assert torch.equal(writer.log.serve(tag(1)), expected(7))


def test_copies_go_on_while_something_is_hashed(slow_hash):
    memory = Memory()
    with writing(SlowDevice()) as writer:
        for number in range(2):
            writer.received(tag(number), memory.source(number))
        for _ in range(2):
            assert memory.freed.acquire(timeout=20)
        slow_hash.set()
        writer.await_landed()


def test_a_buffer_is_used_again_only_when_its_tensor_is_hashed(slow_hash):
    with writing(SlowDevice()) as writer:
        for number in range(6):
            writer.received(tag(number), expected(number))
        threading.Timer(0.05, slow_hash.set).start()
        writer.await_landed()
        assert writer.log.received(1) == {tag(one): tensor_hash(expected(one)) for one in range(6)}


def test_a_hash_that_fails_ends_the_copies_too(monkeypatch):
    def broken(tensor):
        raise MemoryError("no memory")

    monkeypatch.setattr(log_writer, "tensor_hash", broken)
    with writing(SlowDevice()) as writer:
        writer.received(tag(0), expected(0))
        with pytest.raises(LogWriteError, match="no memory"):
            writer.await_landed()
        with pytest.raises(LogWriteError, match="no memory"):
            writer.received(tag(1), expected(1))
