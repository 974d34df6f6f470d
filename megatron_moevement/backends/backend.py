# SPDX-License-Identifier: Apache-2.0
"""What the training program asks of the device it runs on, and which device it runs on."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from megatron_moevement.errors import UserError

if TYPE_CHECKING:
    import torch


class BackendName(Enum):
    """The devices a model can train on."""

    CPU = "cpu"
    CUDA = "cuda"


class Collectives(Enum):
    """What carries collectives, by the name of torch's backend."""

    GLOO = "gloo"
    """The host: a group connects its members when it is made, and an aborted operation fails."""
    NCCL = "nccl"
    """The device: members connect at their first call, the host waits where it reads a result, and
    what was aborted is garbage."""


Pin = Callable[["torch.Tensor"], Callable[[], None]]
"""Makes host memory a target of asynchronous copies; returns what undoes it."""


class CopyStream(Protocol):
    """Where copies from the device to the host run, beside the computation."""

    checksum_threads: int
    """So many threads may read at once what was copied; the computation needs the other cores."""

    def fork(self) -> Callable[[], None]:
        """Marks the end of what the calling thread has enqueued on the device.

        Returns:
            Orders what is copied from its call on behind that mark; the copying thread calls it.
        """

    def copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Enqueues copies into host memory; a target may have another type than its source.

        One call for many tensors lets other threads run meanwhile: each call into torch takes
        Python's lock once.
        """

    def join(self) -> None:
        """Waits until every copy has run."""

    def host_memory(self, size_bytes: int) -> torch.Tensor:
        """Returns bytes of host memory that copies reach without a wait."""


class Backend(abc.ABC):
    """A device, as the training program sees it; one instance per process."""

    name: BackendName
    collectives: Collectives
    """What carries the model's collectives."""

    @abc.abstractmethod
    def install(self) -> None:
        """Makes Megatron-Core compute on this device; call before Megatron is imported."""

    @abc.abstractmethod
    def uninstall(self) -> None:
        """Undoes `install`."""

    @abc.abstractmethod
    def check_device(self, local_rank: int) -> None:
        """Checks that a process will have a device, and opens none: forked processes inherit it.

        Raises:
            UserError: the machine has no device of that number.
        """

    @abc.abstractmethod
    def device(self, local_rank: int) -> torch.device:
        """Binds the calling thread to its device, in each generation anew, and returns it.

        Raises:
            UserError: the machine has no device of that number.
        """

    @abc.abstractmethod
    def use_deterministic_kernels(self) -> None:
        """Makes torch use no kernels whose result depends on timing (`--deterministic-mode`).

        Raises:
            UserError: the environment leaves something to chance.
        """

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Waits until everything that was enqueued on the device has run."""

    @abc.abstractmethod
    def copy_stream(self) -> CopyStream:
        """Returns a stream of its own for copies to the host; one thread uses it."""

    @abc.abstractmethod
    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        """Makes host memory a target of asynchronous copies.

        Args:
            memory: bytes that begin on a page.

        Returns:
            What undoes it: to be called once, while the memory is still there.

        Raises:
            UserError: the system does not let so much memory be locked.
        """

    @abc.abstractmethod
    def parts(self) -> dict[str, str]:
        """Returns what decides bits on this machine, name to name: device, its place, libraries."""

    @abc.abstractmethod
    def peak_memory_bytes(self) -> int:
        """Returns the most memory this process has held: device memory, on the CPU resident."""


def choose(requested: BackendName | None) -> BackendName:
    """Returns the backend to use: the one asked for, else CUDA where there is a GPU.

    Raises:
        UserError: CUDA is asked for and torch sees no GPU.
    """
    import torch  # noqa: PLC0415  (the package imports nothing heavy)

    available = torch.cuda.is_available()
    if requested is BackendName.CUDA and not available:
        raise UserError(
            "--moevement-backend cuda: torch sees no CUDA device on this machine; "
            "use --moevement-backend cpu, or mend the driver or the torch build"
        )
    return requested or (BackendName.CUDA if available else BackendName.CPU)


def load(name: BackendName) -> Backend:
    """Returns the backend of that name; nothing is installed yet."""
    if name is BackendName.CUDA:
        from megatron_moevement.backends.cuda import CudaBackend  # noqa: PLC0415

        return CudaBackend()
    from megatron_moevement.backends.cpu import CpuBackend  # noqa: PLC0415

    return CpuBackend()
