# SPDX-License-Identifier: Apache-2.0
"""Copies from a GPU: the bits of the cast, behind what was enqueued, in bounded device memory."""

import contextlib
import mmap
import time

import pytest
import torch

from megatron_moevement.backends import staging
from megatron_moevement.backends.cuda import CudaBackend, CudaCopyStream
from megatron_moevement.runtime.capture.capture import Capture, HostCopies

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

PIECE_BYTES = 16 << 20  # as docs/understand/sparse_checkpoints.md says
LARGE = 5 * PIECE_BYTES + 5
SLEEP_CYCLES = 1_000_000_000  # about half a second


@contextlib.contextmanager
def pinned(size_bytes):
    """Yields host memory that the backend has pinned, as it pins that of a store's file."""
    memory = torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)
    unpin = CudaBackend().pin(memory)
    try:
        yield memory
    finally:
        torch.cuda.synchronize()
        unpin()


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def values(size):
    """Returns values of every size, and what a cast may get wrong: ties, overflows, no numbers."""
    random = torch.Generator("cuda").manual_seed(11)
    found = torch.randn(size, device="cuda", generator=random) * 300.0
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1 + 2**-9, 1 + 3 * 2**-9]
    special += [65519.0, 65520.0, 1e-7, -1e-40, 3.4e38]
    found[: len(special)] = torch.tensor(special)
    return found


@pytest.mark.parametrize("size", [100, LARGE])
@pytest.mark.parametrize(
    ("source_type", "target_type"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
    ],
)
def test_a_copy_has_the_bits_of_the_cast(size, source_type, target_type):
    source = values(size).to(source_type)
    expected = source.to(target_type).cpu()
    with pinned(size * target_type.itemsize) as memory:
        target = memory.view(target_type)
        stream = CudaBackend().copy_stream()
        stream.fork()()
        stream.copy([source], [target])
        stream.join()
        assert torch.equal(bits(target), bits(expected))


def test_a_tensor_of_two_dimensions_arrives_in_its_shape():
    source = values(6 * 50).view(6, 50)
    with pinned(source.numel() * 2) as memory:
        target = memory.view(torch.bfloat16).view(6, 50)
        stream = CudaCopyStream()
        stream.fork()()
        stream.copy([source], [target])
        stream.join()
        assert torch.equal(bits(target), bits(source.bfloat16().cpu()))


def test_many_copies_at_once_have_the_bits_of_their_casts():
    types = [torch.float32, torch.bfloat16, torch.float16] * 40
    sources = [values(100 + number) for number in range(len(types))]
    with pinned(sum(source.numel() * 4 + 64 for source in sources)) as memory:
        targets, offset = [], 0
        for source, target_type in zip(sources, types, strict=True):
            place = memory[offset : offset + source.numel() * target_type.itemsize]
            targets.append(place.view(target_type))
            offset += place.nbytes + -place.nbytes % 64
        stream = CudaBackend().copy_stream()
        stream.fork()()
        stream.copy(sources, targets)
        stream.join()
        for source, target in zip(sources, targets, strict=True):
            assert torch.equal(bits(target), bits(source.to(target.dtype).cpu()))


def copy_behind_late_work(*, fork):
    """Copies what a slow kernel makes on the current stream; returns what has arrived."""
    source = torch.zeros(1000, device="cuda").fill_(2.0)
    with pinned(source.nbytes) as memory:
        target = memory.view(torch.float32)
        stream = CudaCopyStream()
        torch.cuda._sleep(1)  # a kernel's first launch may wait for all others
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        source.fill_(1.0)
        if fork:
            stream.fork()()
        stream.copy([source], [target])
        stream.join()
        return sorted(set(target.tolist()))


def test_the_side_stream_waits_for_what_was_enqueued_before():
    assert copy_behind_late_work(fork=True) == [1.0]


def test_without_the_fork_it_would_not_wait():
    assert copy_behind_late_work(fork=False) == [2.0]


def copy_and_measure(source, target_type):
    """Returns by how many bytes the peak of device memory rises over a copy."""
    with pinned(source.numel() * target_type.itemsize) as memory:
        stream = CudaCopyStream()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # a block from there may be larger than what is asked for
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        stream.fork()()
        stream.copy([source], [memory.view(target_type)])
        stream.join()
        return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("target_type", [torch.bfloat16, torch.float16])
def test_a_cast_takes_the_device_memory_of_one_piece(target_type):
    assert staging.PIECE_BYTES == PIECE_BYTES
    source = torch.ones(LARGE, device="cuda")
    assert 0 < copy_and_measure(source, target_type) <= PIECE_BYTES


def test_a_copy_without_a_cast_takes_no_device_memory():
    assert copy_and_measure(torch.ones(LARGE, device="cuda"), torch.float32) == 0


def test_memory_is_pinned_where_it_lies_and_views_of_it_are():
    with pinned(8 * mmap.PAGESIZE) as memory:
        assert memory.is_pinned()
        assert memory[mmap.PAGESIZE :].view(torch.bfloat16).is_pinned()
    assert not memory.is_pinned()


def test_copies_into_pinned_memory_do_not_hold_the_thread_up():
    source = torch.ones(1000, device="cuda")
    with pinned(source.nbytes) as memory:
        stream = CudaCopyStream()
        done = torch.cuda.Event()
        torch.cuda._sleep(SLEEP_CYCLES)
        done.record()
        stream.fork()()
        stream.copy([source], [memory.view(torch.float32)])
        assert not done.query()
        stream.join()
        assert done.query()


def test_a_small_copy_of_the_computation_does_not_wait_for_a_large_one_beside_it():
    source = torch.ones(1 << 28, device="cuda")  # 20 ms at 54 GB/s
    small = torch.zeros(1, device="cuda")
    with pinned(source.nbytes) as memory:
        target = memory.view(torch.float32).zero_()
        with Capture(CudaCopyStream()) as capture:
            capture.begin([HostCopies([source], [target])], lambda: None)
            while not target[0]:
                time.sleep(0)
            small.item()
            assert not target[-1]
            capture.await_copies()
        assert target.all()


def test_a_capture_beside_training_takes_the_state_of_each_step():
    live = [torch.zeros(1 << 20, device="cuda") for _ in range(4)]
    steps = 8
    slot_bytes = sum(tensor.numel() * 2 for tensor in live)
    with pinned(steps * slot_bytes) as memory, Capture(CudaCopyStream()) as capture:
        hosts = memory.view(torch.bfloat16).view(steps, len(live), -1)
        for step in range(steps):
            torch.cuda._sleep(SLEEP_CYCLES // 20)
            for tensor in live:
                tensor.fill_(float(step))
            capture.begin([HostCopies(live, list(hosts[step]))], lambda: None)
            capture.await_copies()
        wrong = [step for step in range(steps) if not (hosts[step] == float(step)).all()]
        assert wrong == []
