# SPDX-License-Identifier: Apache-2.0
"""Copies from the device to the host, and the upstream log: their bits, and how fast they are."""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_moevement.backends.backend import BackendName, choose, load
from megatron_moevement.policy.job.boundary import BoundaryTag, Direction
from megatron_moevement.runtime.upstream_log.log import UpstreamLog, step_bytes, tensor_hash
from megatron_moevement.runtime.upstream_log.log_writer import open_writer
from tests.harness.gpu_check.results import Found, Scale

_MIB = 1 << 20
_BYTES = {Scale.SMALL: 4 * _MIB, Scale.FULL: 1024 * _MIB}
_ROUNDS = 5
_CASTS = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
)
_LOGGED_SHAPE = {Scale.SMALL: (64, 2, 64), Scale.FULL: (4096, 1, 4096)}
_TENSORS, _STEPS = 16, 3


def copy(scale: Scale, folder: Path) -> Found:
    """Copies tensors into pinned memory, with and without a cast."""
    del folder
    backend = load(choose(None))
    device = backend.device(0)
    stream = backend.copy_stream()
    memory = torch.frombuffer(mmap.mmap(-1, _BYTES[scale]), dtype=torch.uint8)
    backend.pin(memory)
    figures: dict[str, float] = {}
    problems = []
    for source_type, target_type in _CASTS:
        name = f"{_short(source_type)} to {_short(target_type)}"
        source = _values(_BYTES[scale] // 4, device).to(source_type)
        target = memory[: source.numel() * target_type.itemsize].view(target_type)

        def copy_once(source: torch.Tensor = source, target: torch.Tensor = target) -> None:
            stream.fork()
            stream.copy([source], [target])
            stream.join()

        seconds, peak_bytes = _measured(copy_once, device)
        figures[f"{name}, GB/s"] = target.nbytes / seconds / 1e9
        if device.type == "cuda":
            figures[f"{name}, device MiB"] = peak_bytes / _MIB
        if not torch.equal(_bits(target), _bits(source.to(target_type).cpu())):
            problems.append(f"{name}: other bits than those of the cast")
    return Found(figures, problems)


def log(scale: Scale, folder: Path) -> Found:
    """Logs what a stage sends and receives, and reads it again."""
    del folder
    backend = load(choose(None))
    device, shape = backend.device(0), _LOGGED_SHAPE[scale]
    size = step_bytes(_TENSORS, shape, torch.bfloat16)
    kept = UpstreamLog(max_steps=_STEPS, step_bytes=size, pin=backend.pin)
    tensors = [
        _values(torch.Size(shape).numel(), device, seed).view(shape).bfloat16()
        for seed in range(_TENSORS)
    ]
    hashes = [tensor_hash(each.cpu()) for each in tensors]
    durations_s, problems = [], []
    with open_writer(kept, backend.name, backend.copy_stream()) as writer:
        for step in range(1, _STEPS + 1):
            kept.begin_step(step)
            backend.synchronize()
            began_s = time.perf_counter()
            for number, tensor in enumerate(tensors):
                writer.sent(_tag(step, number, Direction.FORWARD), tensor)
                writer.received(_tag(step, number, Direction.BACKWARD), tensor)
            writer.await_landed()
            durations_s.append(time.perf_counter() - began_s)
            kept.end_step(step)
    for step in range(1, _STEPS + 1):
        received = kept.received(step)
        for number, expected in enumerate(hashes):
            if tensor_hash(kept.serve(_tag(step, number, Direction.FORWARD))) != expected:
                problems.append(f"step {step}: sent tensor {number} has other bits")
            if received[_tag(step, number, Direction.BACKWARD)] != expected:
                problems.append(f"step {step}: received tensor {number} has another hash")
    moved_bytes = 2 * sum(each.nbytes for each in tensors)
    return Found({"sent and received, GB/s": moved_bytes / min(durations_s) / 1e9}, problems)


def _tag(step: int, number: int, direction: Direction) -> BoundaryTag:
    ends = (0, 1) if direction is Direction.FORWARD else (1, 0)
    return BoundaryTag(step, direction, *ends, number)


def _measured(act: Callable[[], None], device: torch.device) -> tuple[float, int]:
    """Returns the median time after a first one, and by how much device memory rose at most."""
    act()
    on_gpu = device.type == BackendName.CUDA.value
    before = 0
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    durations_s = []
    for _ in range(_ROUNDS):
        began_s = time.perf_counter()
        act()
        durations_s.append(time.perf_counter() - began_s)
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0
    return statistics.median(durations_s), peak


def _values(size: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(size, device=device, generator=generator) * 300.0


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
