# SPDX-License-Identifier: Apache-2.0
"""Makes torch take the group for NCCL's, in this process: code for NCCL runs as it is.

On a machine with GPUs its ranks share them, in turn: there may be more ranks than GPUs. NVRx finds
the device of a process by LOCAL_RANK, too.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed

from megatron_moevement.backends.backend import BackendName, Collectives
from megatron_moevement.backends.cpu import CpuBackend
from tests.harness.nccl_like.group import NcclLikeGroup

dist: Any = torch.distributed
_c10d: Any = dist.distributed_c10d
_VERSION = 22900
"""As torch writes it into errors: 2.29.0."""
_batch_of_gloo = dist.batch_isend_irecv


def install(backend: BackendName = BackendName.CPU) -> None:
    """Installs it; call before Megatron is imported.

    Args:
        backend: where its tensors are.
    """
    dist.ProcessGroupNCCL = _c10d.ProcessGroupNCCL = NcclLikeGroup
    dist.batch_isend_irecv = _c10d.batch_isend_irecv = _batch
    if backend is BackendName.CUDA:
        NcclLikeGroup.device = torch.device("cuda")
        share_devices()
        return
    _c10d._NCCL_AVAILABLE = True  # noqa: SLF001  (torch is to believe it)
    torch._C._nccl_version = lambda: _VERSION  # noqa: SLF001
    torch._C._nccl_version_suffix = lambda: b""  # noqa: SLF001
    CpuBackend.collectives = Collectives.NCCL


def share_devices() -> None:
    """Gives this process one of the machine's GPUs by its local rank, in turn."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    os.environ["LOCAL_RANK"] = str(local_rank % torch.cuda.device_count())


def _batch(messages: list[torch.distributed.P2POp]) -> Any:
    """Sends and receives as torch does where a group of its own supports batches.

    Torch asks for the exact type of the group, which one that is written in Python can't have.
    """
    group = messages[0].group or dist.group.WORLD
    if not isinstance(group, NcclLikeGroup):
        return _batch_of_gloo(messages)
    device = messages[0].tensor.device
    with _c10d._coalescing_manager(group, device, async_ops=True) as manager:  # noqa: SLF001
        for message in messages:
            peer = "group_dst" if message.op is dist.isend else "group_src"
            message.op(
                message.tensor,
                group=message.group,
                tag=message.tag,
                **{peer: message.group_peer},
            )
    return manager.works
