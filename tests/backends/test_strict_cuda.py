# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend on a runtime without a GPU that raises where the real one fails or leaks."""

import mmap
import threading

import pytest
import torch

from megatron_moevement.backends import staging
from megatron_moevement.backends.cuda import CudaBackend
from megatron_moevement.policy.job.boundary import BoundaryTag, Direction
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.runtime.capture.capture import Capture, HostCopies
from megatron_moevement.runtime.slots.ring_file import RingShape
from megatron_moevement.runtime.slots.store_identity import StoreIdentity
from megatron_moevement.runtime.stores.store import RingRole, StoreDirectory
from megatron_moevement.runtime.upstream_log.log import UpstreamLog
from megatron_moevement.runtime.upstream_log.log_writer import BackgroundWriter
from tests.harness.strict_cuda.install import stand_ins
from tests.harness.strict_cuda.runtime import StrictCudaError, StrictRuntime
from tests.harness.strict_cuda.streams import StrictEvent

RANK = LogicalRank()
SHAPE = RingShape.equal(capacity=3, buffer_bytes=5000, max_parts=2)
DEVICE = 3


@pytest.fixture
def runtime(monkeypatch):
    made = StrictRuntime(devices=8)
    for name, stand_in in stand_ins(made).items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    yield made
    made.check()


@pytest.fixture
def backend(runtime):
    made = CudaBackend()
    made.device(DEVICE)
    return made


@pytest.fixture
def store(tmp_path, runtime):
    with StoreDirectory(tmp_path, StoreIdentity("run", "0123"), 0) as opened:
        yield opened


def memory_of(size_bytes):
    mapping = mmap.mmap(-1, size_bytes)
    return mapping, torch.frombuffer(mapping, dtype=torch.uint8)


def pinned_ring(store, backend):
    ring = store.create_ring(RingRole.OWN, RANK, SHAPE)
    ring.pin(lambda memory: backend.pin(torch.frombuffer(memory, dtype=torch.uint8)))
    return ring


def test_the_runtime_refuses_what_overlaps(backend):
    _, memory = memory_of(4 * mmap.PAGESIZE)
    unpin = backend.pin(memory[mmap.PAGESIZE :])
    with pytest.raises(StrictCudaError, match="already registered"):
        backend.pin(memory[: 2 * mmap.PAGESIZE])
    unpin()
    with pytest.raises(StrictCudaError, match="is not registered"):
        unpin()


def test_the_runtime_finds_what_was_unmapped():
    runtime = StrictRuntime(devices=1)
    mapping, memory = memory_of(mmap.PAGESIZE)
    runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    del memory
    mapping.close()
    with pytest.raises(StrictCudaError, match="was unmapped"):
        runtime.check()


@pytest.mark.parametrize("end", ["drop", "clear", "close_files", "replace"])
def test_a_ring_is_pinned_until_its_file_is_closed(store, backend, runtime, end):
    ring = pinned_ring(store, backend)
    ring.pin(lambda memory: pytest.fail("pinned twice"))
    assert runtime.registered_bytes >= SHAPE.capacity * SHAPE.buffer_bytes
    match end:
        case "drop":
            store.drop_ring(RingRole.OWN, RANK)
        case "replace":
            store.create_ring(RingRole.OWN, RANK, SHAPE)
        case _:
            getattr(store, end)()
    assert (runtime.registered_bytes, ring.is_pinned) == (0, False)
    runtime.check()
    for _ in range(3):  # the next one may lie where the former one lay
        pinned_ring(store, backend)
    assert store.is_pinned


def test_a_ring_that_nobody_has_closed_is_pinned_for_as_long_as_it_is_there(
    store, backend, runtime
):
    ring = pinned_ring(store, backend)
    store._rings.clear()  # as where an interrupt comes before it is closed
    del ring
    assert runtime.registered_bytes == 0


def test_a_log_is_pinned_until_it_is_closed(backend, runtime):
    logs = []
    for _ in range(3):
        log = UpstreamLog(max_steps=2, step_bytes=4096, pin=backend.pin)
        assert runtime.registered_bytes == log.capacity_bytes
        log.close()
        log.close()
        assert (runtime.registered_bytes, log.steps) == (0, ())
        logs.append(log)
    UpstreamLog(max_steps=2, step_bytes=4096, pin=backend.pin)
    assert runtime.registered_bytes == 0


def test_threads_that_copy_have_the_device_of_their_process(backend, runtime):
    log = UpstreamLog(max_steps=1, step_bytes=4096)
    source, target = torch.ones(10), torch.zeros(10, dtype=torch.bfloat16)
    tag = BoundaryTag(0, Direction.FORWARD, sender=0, receiver=1, micro_batch=0)
    log.begin_step(0)
    with (
        Capture(backend.copy_stream()) as capture,
        BackgroundWriter(log, backend.copy_stream()) as writer,
    ):
        capture.begin([], lambda: None)
        capture.begin([HostCopies([source], [target])], lambda: None)
        capture.await_landed()
        writer.sent(tag, source)
        writer.await_landed()
    assert torch.equal(target, source.bfloat16())
    assert torch.equal(log.serve(tag), source)
    assert runtime.contexts == {DEVICE: "MainThread"}


def test_one_piece_is_on_its_way_at_a_time(backend, monkeypatch):
    done = []

    def noting(owner, name):
        act = getattr(owner, name)
        noted = lambda *args: (done.append(name), act(*args))[1]  # noqa: E731
        monkeypatch.setattr(owner, name, noted)

    monkeypatch.setattr(staging, "PIECE_BYTES", 40)
    noting(staging.Staging, "copy")
    noting(StrictEvent, "record")
    noting(StrictEvent, "synchronize")
    source, target = torch.randn(25), torch.zeros(25)
    stream = backend.copy_stream()
    stream.copy([source], [target])
    assert done == [*["copy", "record", "synchronize"] * 2, "copy", "record"]
    stream.copy([source[:1]], [target[:1]])
    stream.join()
    assert done[8:] == ["copy", "record", "record", "synchronize"]
    assert torch.equal(source, target)


def test_memory_is_pinned_by_any_thread_on_the_device_of_its_process(backend, runtime):
    _, memory = memory_of(mmap.PAGESIZE)

    def pin_and_unpin():
        backend.pin(memory)()

    thread = threading.Thread(target=pin_and_unpin)
    thread.start()
    thread.join()
    assert runtime.contexts == {DEVICE: "MainThread"}
