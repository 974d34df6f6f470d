# SPDX-License-Identifier: Apache-2.0
"""One rank's part of a job built by itself, on whatever machine, and without memory for tensors.

Model and optimizer come from the code of a running job. Their tensors have shapes, types and sizes,
and no elements; groups have members that do not exist.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend, too
from torch.utils._device import _device_constructors

from megatron_moevement.backends.backend import BackendName
from megatron_moevement.integrations.megatron.optimizer import SplitOptimizer
from megatron_moevement.integrations.megatron.process_groups import (
    Groups,
    build_groups,
    leave_job,
)
from megatron_moevement.settings.parallelism import Parallelism

_META = "meta"
_PREFIX = {BackendName.CPU: "torch.", BackendName.CUDA: "torch.cuda."}
"""What the name of a tensor's type begins with: upstream goes by it."""


class _WithoutElements(TorchFunctionMode):
    """Makes every tensor without elements, wherever it was to lie.

    A tensor of given numbers has them: upstream reads its scalars at once.
    """

    _MADE = frozenset(_device_constructors()) - {torch.tensor}
    _MOVED = (torch.Tensor.to, torch.Tensor.cuda)

    def __init__(self, backend: BackendName) -> None:
        """Takes the place of a device.

        Args:
            backend: what the tensors seem to lie on.
        """
        super().__init__()
        self._prefix = _PREFIX[backend]

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._MADE:
            kwargs["device"] = _META
        elif func in self._MOVED and args[0].is_meta:
            wanted = [one for one in (*args[1:], *kwargs.values()) if isinstance(one, torch.dtype)]
            return args[0].to(wanted[0]) if wanted else args[0]
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace(f"torch.{_META}.", self._prefix)
        return result


@contextlib.contextmanager
def weightless_rank(
    rank: int, world_size: int, parallelism: Parallelism, num_layers: int, backend: BackendName
) -> Iterator[Groups]:
    """Makes this process a rank of a job by itself; what is built meanwhile has no elements.

    Collectives return at once and leave everything as it is.

    Yields:
        The groups of the rank.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        groups = build_groups(parallelism, num_layers)
        with _WithoutElements(backend):
            yield groups
    finally:
        leave_job()


def state_bytes(chunks: Sequence[DistributedDataParallel], optimizer: SplitOptimizer) -> int:
    """Returns the bytes of weights, gradients, master weights and moments, each memory once."""
    tensors: list[torch.Tensor] = []
    for chunk in chunks:
        tensors += chain(chunk.parameters(), chunk.module.buffers())
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            tensors += [one for one in (buffer.param_data, buffer.grad_data) if one is not None]
    for part in optimizer.parts:
        for group in part.param_groups:
            for master in group["params"]:
                kept = part.optimizer.state[master].values()
                tensors += [master, *(one for one in kept if isinstance(one, torch.Tensor))]
    storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in tensors}  # noqa: SLF001
    return sum(storage.nbytes() for storage in storages.values())
