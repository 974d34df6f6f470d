"""The CUDA backend: Megatron-Core as it is, over NCCL."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from megatron_moevement.backends.backend import Backend, BackendName, CopyStream
from megatron_moevement.errors import UserError

_DETERMINISTIC_ENVIRONMENT = {"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Variables that must be fixed, each with a value that is."""


class CudaBackend(Backend):
    """NVIDIA GPUs; one process per GPU."""

    name = BackendName.CUDA
    process_group_backend = "nccl"
    connects_early = False

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
        """Makes GPU `local_rank` the current device of the process."""
        self.check_device(local_rank)
        torch.cuda.set_device(local_rank)
        self._device = local_rank
        return torch.device("cuda", local_rank)

    def use_deterministic_kernels(self) -> None:
        """Makes torch refuse such kernels, and wants algorithms of NCCL and cuBLAS fixed.

        Source: `--deterministic-mode` of megatron/training/arguments.py.
        """
        for name, example in _DETERMINISTIC_ENVIRONMENT.items():
            if name not in os.environ:
                raise UserError(
                    f"--deterministic-mode needs {name} in the environment; set {name}={example}"
                )
        torch.use_deterministic_algorithms(True)

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
                "of locked memory (ulimit -l), or lower --moevement-window"
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
        """Returns the current GPU, and the versions of what computes on it."""
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        return {
            "GPU": torch.cuda.get_device_name(),
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

    A copy into another type is cast on the device first, piece by piece, so that it takes no more
    than `STAGING_ELEMENTS` elements of device memory.
    """

    STAGING_ELEMENTS = 1 << 24

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def fork(self) -> None:
        """Lets the side stream wait for what is enqueued on the current one."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Enqueues the copy on the side stream; asynchronous where the target is pinned."""
        torch.cuda.set_device(self._stream.device)  # a thread begins on GPU 0 and would go back
        with torch.cuda.stream(self._stream):
            if source.dtype is target.dtype:
                target.copy_(source, non_blocking=True)
                return
            size = self.STAGING_ELEMENTS
            starts = range(0, source.numel(), size)
            flat, host = source.reshape(-1), target.view(-1)
            pieces = ((flat[at : at + size], host[at : at + size]) for at in starts)
            for device_piece, host_piece in pieces:
                host_piece.copy_(device_piece.to(host_piece.dtype), non_blocking=True)

    def join(self) -> None:
        """Waits for the side stream."""
        torch.cuda.set_device(self._stream.device)
        self._stream.synchronize()
