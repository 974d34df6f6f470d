# SPDX-License-Identifier: Apache-2.0
"""Lets the CPU backend pin, copy and choose its device as the CUDA backend does, strictly."""

from __future__ import annotations

from typing import Any

import torch

from megatron_moevement.backends.cpu import CpuBackend
from megatron_moevement.backends.cuda import CudaBackend
from megatron_moevement.backends.host_cuda import HOST
from tests.harness.strict_cuda.runtime import StrictRuntime
from tests.harness.strict_cuda.streams import StrictEvent, StrictStreams

_cuda: Any = torch.cuda


def stand_ins(runtime: StrictRuntime) -> dict[str, Any]:
    """Returns what takes the place of names of `torch.cuda`."""
    streams = StrictStreams(runtime)
    return {
        "cudart": lambda: runtime,
        "device_count": lambda: runtime.devices,
        "set_device": streams.set_device,
        "current_device": lambda: runtime.device,
        "current_stream": streams.current,
        "default_stream": streams.current,
        "set_stream": streams.set_stream,
        "Event": StrictEvent,
        "Stream": streams.make,
        "stream": streams.entered,
    }


def install(runtime: StrictRuntime) -> None:
    """Installs it in this process, for good; Megatron computes on the host as before."""
    for name, stand_in in stand_ins(runtime).items():
        setattr(_cuda, name, stand_in)
    backend = CudaBackend()

    def device(self: CpuBackend, local_rank: int) -> torch.device:
        backend.device(local_rank)
        return HOST

    changed: Any = CpuBackend
    changed.device = device
    changed.pin = lambda self, memory: backend.pin(memory)
    changed.copy_stream = lambda self: backend.copy_stream()
