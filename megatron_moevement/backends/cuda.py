# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend: Megatron-Core as it is, over NCCL."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_moevement.backends.backend import Backend, BackendName, Collectives, CopyStream
from megatron_moevement.backends.staging import Staging, pieces
from megatron_moevement.errors import UserError

_DETERMINISTIC_ENVIRONMENT = {"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Variables that must be fixed, each with a value that is."""


class CudaBackend(Backend):
    """NVIDIA GPUs; one process per GPU."""

    name = BackendName.CUDA
    collectives = Collectives.NCCL

    def __init__(self) -> None:
        """Has no device yet."""
        self._device: int | None = None

    def install(self) -> None:
        """Does nothing: Megatron-Core is written for CUDA."""

    def uninstall(self) -> None:
        """Does nothing."""

    def check_device(self, local_rank: int) -> None:
        """Counts the GPUs, which NVIDIA's management library does without CUDA."""
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise UserError(
                f"LOCAL_RANK {local_rank}: this machine has {count} CUDA device(s); "
                "start at most one process per GPU"
            )

    def device(self, local_rank: int) -> torch.device:
        """Makes GPU `local_rank` the current device, and its default stream the current one.

        An interrupt within upstream's `torch.cuda.stream` may leave another stream current: what it
        computes would then be ordered behind nothing.
        """
        self.check_device(local_rank)
        torch.cuda.set_device(local_rank)
        torch.cuda.set_stream(torch.cuda.default_stream())
        self._device = local_rank
        return torch.device("cuda", local_rank)

    def use_deterministic_kernels(self) -> None:
        """Makes torch refuse such kernels, and wants algorithms of NCCL and cuBLAS fixed.

        Nothing is compiled either: Inductor rounds where its kernels end, which times and the
        parameters that are frozen decide.

        Source: `--deterministic-mode` of megatron/training/arguments.py.
        """
        for name, example in _DETERMINISTIC_ENVIRONMENT.items():
            if name not in os.environ:
                raise UserError(
                    f"--deterministic-mode needs {name} in the environment; set {name}={example}"
                )
        torch.use_deterministic_algorithms(True)
        torch.compiler.set_stance("force_eager")

    def synchronize(self) -> None:
        """Waits for all streams of the current GPU."""
        torch.cuda.synchronize()

    def copy_stream(self) -> CopyStream:
        """Returns a side stream of the current GPU."""
        return CudaCopyStream()

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        """Registers host memory with CUDA."""
        cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._bind()
        address = memory.data_ptr()
        result = cuda.cudaHostRegister(address, memory.nbytes, 0)
        if int(result) != 0:
            raise UserError(
                f"CUDA can't lock {memory.nbytes} bytes of host memory ({result}); raise the limit "
                "of locked memory (ulimit -l), or give --moevement-window a smaller W"
            )

        def unpin() -> None:
            self._bind()
            cuda.cudaHostUnregister(address)

        return unpin

    def _bind(self) -> None:
        """Lets the calling thread use the GPU of the process: each thread begins on GPU 0."""
        if self._device is not None:
            torch.cuda.set_device(self._device)

    def parts(self) -> dict[str, str]:
        """Returns the current GPU, and the versions of what computes on it.

        Its place on the bus is among them: NCCL orders its rings by the wires between GPUs. GPUs of
        one model in the same place of two machines are alike.
        """
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        gpu: Any = torch.cuda.get_device_properties()
        place = (gpu.pci_domain_id, gpu.pci_bus_id, gpu.pci_device_id)
        return {
            "GPU": gpu.name,
            "GPU of its machine": ":".join(f"{number:x}" for number in place),
            "torch": torch.__version__,
            "CUDA": str(torch.version.cuda),
            "cuDNN": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
            "NCCL": ".".join(str(number) for number in nccl),
        }

    def peak_memory_bytes(self) -> int:
        """Returns the peak of the caching allocator on the current GPU."""
        return int(torch.cuda.max_memory_allocated())


class CudaCopyStream:
    """A side stream of the GPU that was current when it was made.

    A copy into another type is cast on the device first, in memory of its own. One piece is on its
    way at a time: a GPU has one engine for copies to the host, which takes them in the order of
    their being enqueued, those of the computation among them. To be woken for each piece would
    hold up the thread that launches the computation; the first one, whose computation may be far
    behind, is waited for without a busy core.

    A core reads memory at a fifth of the rate at which a GPU writes it: several read it, or large
    slots take longer than an iteration.
    """

    checksum_threads = 4

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._first, self._next = (
            torch.cuda.Event(blocking=blocking)  # type: ignore[no-untyped-call]
            for blocking in (True, False)
        )
        self._staging = Staging()

    def fork(self) -> Callable[[], None]:
        """Records an event on the current stream; the side stream will wait for it."""
        event = torch.cuda.current_stream(self._stream.device).record_event()
        return lambda: self._stream.wait_event(event)

    def copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Enqueues each piece when the one before has been copied, on the side stream."""
        torch.cuda.set_device(self._stream.device)  # a thread begins on GPU 0 and would go back
        with torch.cuda.stream(self._stream):
            copied: torch.cuda.Event | None = None
            for piece in pieces(sources, targets):
                if copied is not None:
                    copied.synchronize()
                self._staging.copy(*piece)
                copied = self._first if copied is None else self._next
                copied.record(self._stream)

    def join(self) -> None:
        """Waits for the side stream."""
        torch.cuda.set_device(self._stream.device)
        self._first.record(self._stream)
        self._first.synchronize()

    def host_memory(self, size_bytes: int) -> torch.Tensor:
        """Returns pinned memory of torch's cache."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
