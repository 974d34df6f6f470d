# SPDX-License-Identifier: Apache-2.0
"""The CPU backend: unmodified Megatron-Core computes on the host, over gloo.

Megatron-Core names its device in few ways: `torch.cuda.X`, `value.cuda()`, `value.is_cuda`,
`record_stream`, and strings such as `"cuda"`. All are names or constants in its compiled code, and
while a Megatron module is imported they are replaced there by the host's. So torch itself stays as
it is for everybody else in the process, nothing is wrapped, no operation costs more than before.

    `torch.cuda.X`          -> `torch.moevement_host.X`   (module `host_cuda`; unknown X raises)
    `value.cuda()`          -> `value.moevement_host()`   (returns the value)
    `value.is_cuda`         -> `value.is_cpu`             (is it on the device we compute on?)
    `tensor.record_stream`  -> `tensor.moevement_record_stream`  (does nothing)
    `distributed.all_gather` -> `distributed.moevement_all_gather`  (sizes may differ)
    `"cuda"`                -> `"cpu"`
    `"torch.cuda.XTensor"`  -> `"torch.XTensor"`          (what `param.type()` returns here)
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import platform
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

from megatron_moevement.backends import host_collectives, host_cuda
from megatron_moevement.backends.backend import Backend, BackendName, Collectives, CopyStream
from megatron_moevement.backends.staging import copy_each

REWRITTEN_PACKAGES = ("megatron",)
"""Top-level packages whose code is made to compute on the host."""

_HOST_NAME = "moevement_host"
_RECORD_STREAM_NAME = "moevement_record_stream"
_ALL_GATHER_NAME = "moevement_all_gather"
_NAMES = {
    "cuda": _HOST_NAME,
    "is_cuda": "is_cpu",
    "record_stream": _RECORD_STREAM_NAME,
    "all_gather": _ALL_GATHER_NAME,
    "torch.cuda": host_cuda.__name__,
}
_CONSTANTS = {"cuda": "cpu"} | {
    f"torch.cuda.{kind}Tensor": f"torch.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")
}


def on_host(code: CodeType) -> CodeType:
    """Returns the code with every name of the GPU replaced by the host's, nested code included."""
    return code.replace(
        co_names=tuple(_NAMES.get(name, name) for name in code.co_names),
        co_consts=tuple(_constant_on_host(value) for value in code.co_consts),
    )


def _constant_on_host(value: object) -> object:
    if isinstance(value, CodeType):
        return on_host(value)
    if isinstance(value, str):
        return _CONSTANTS.get(value, value)
    if isinstance(value, tuple):
        return tuple(_constant_on_host(item) for item in value)
    return value


class _HostLoader(importlib.machinery.SourceFileLoader):
    """Loads a module with its code rewritten; the bytecode cache keeps the original."""

    def get_code(self, fullname: str) -> CodeType | None:
        code = super().get_code(fullname)
        return None if code is None else on_host(code)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if module.__name__ == "megatron.core.jit":
            # torch.compile on the host would compile C++ for minutes, and its fused kernels
            # round otherwise than the eager ones.
            module.disable_jit_fuser()


class _HostFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in REWRITTEN_PACKAGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _HostLoader(spec.loader.name, spec.loader.path)
        return spec


def _is_rewritten(module_name: str) -> bool:
    return module_name.partition(".")[0] in REWRITTEN_PACKAGES


def _stay(value: Any, *_: object, **__: object) -> Any:
    """Stands in for `Tensor.cuda` and `Module.cuda`: the value already is where we compute."""
    return value


def _record_stream(tensor: torch.Tensor, stream: host_cuda.Stream) -> None:
    """Stands in for `Tensor.record_stream`: with one stream no memory is reused too early."""


_ATTRIBUTES: tuple[tuple[Any, str, Any], ...] = (
    (torch, _HOST_NAME, host_cuda),
    (torch.Tensor, _HOST_NAME, _stay),
    (torch.Tensor, _RECORD_STREAM_NAME, _record_stream),
    (torch.nn.Module, _HOST_NAME, _stay),
    (torch.distributed, _ALL_GATHER_NAME, host_collectives.all_gather),
)


class _OneGenerator(logging.Filter):
    """Drops upstream's warning that the host's generator moved while the device's was in use.

    On the host they are one generator, so it always did.
    """

    LOGGER = logging.getLogger("megatron.core.tensor_parallel.random")

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed" not in record.getMessage()


_ONE_GENERATOR = _OneGenerator()


class HostCopyStream:
    """Copies from memory to memory; no device holds anything back."""

    checksum_threads = 1

    def fork(self) -> Callable[[], None]:
        """Marks nothing: what the calling thread has computed is there."""
        return lambda: None

    def copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Copies at once."""
        copy_each(sources, targets)

    def join(self) -> None:
        """Does nothing: all copies have run."""

    def host_memory(self, size_bytes: int) -> torch.Tensor:
        """Returns memory like any other."""
        return torch.empty(size_bytes, dtype=torch.uint8)


class CpuBackend(Backend):
    """The host's cores, over gloo."""

    name = BackendName.CPU
    collectives = Collectives.GLOO

    def install(self) -> None:
        """Lets Megatron-Core compute on the host; installing twice is installing once.

        Raises:
            RuntimeError: Megatron-Core is imported already, with its code for the GPU.
        """
        if any(isinstance(finder, _HostFinder) for finder in sys.meta_path):
            return
        imported = [name for name in sys.modules if name.startswith("megatron.core")]
        if imported:
            raise RuntimeError(
                f"{imported[0]} was imported before the cpu backend was installed; "
                "install the backend first"
            )
        for owner, name, stand_in in _ATTRIBUTES:
            setattr(owner, name, stand_in)
        sys.meta_path.insert(0, _HostFinder())
        _OneGenerator.LOGGER.addFilter(_ONE_GENERATOR)

    def uninstall(self) -> None:
        """Takes everything back; Megatron's modules are forgotten, the next import is pristine."""
        sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, _HostFinder)]
        for name in [name for name in sys.modules if _is_rewritten(name)]:
            del sys.modules[name]
        _OneGenerator.LOGGER.removeFilter(_ONE_GENERATOR)
        for owner, name, _ in _ATTRIBUTES:
            if name in vars(owner):
                delattr(owner, name)

    def check_device(self, local_rank: int) -> None:
        """Does nothing: every process has the host."""

    def device(self, local_rank: int) -> torch.device:
        """Returns the host, whatever the rank."""
        del local_rank
        return host_cuda.HOST

    def use_deterministic_kernels(self) -> None:
        """Makes torch refuse kernels whose result depends on timing."""
        torch.use_deterministic_algorithms(True)

    def synchronize(self) -> None:
        """Returns at once: the host computes synchronously."""

    def copy_stream(self) -> CopyStream:
        """Returns a stream that copies at once, on the thread that asks for it."""
        return HostCopyStream()

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        """Does nothing: copies within memory need no locked pages."""
        return lambda: None

    def parts(self) -> dict[str, str]:
        """Returns the processor, what torch uses of it, and torch's version."""
        return {
            "processor": _processor(),
            "vector instructions": torch.backends.cpu.get_cpu_capability(),
            "torch": torch.__version__,
        }

    def peak_memory_bytes(self) -> int:
        """Returns the peak resident memory of the process."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _processor() -> str:
    """Returns the model as the kernel names it; the architecture where it names none."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def install() -> Callable[[], None]:
    """Installs the CPU backend and returns the function that takes it away again."""
    backend = CpuBackend()
    backend.install()
    return backend.uninstall
