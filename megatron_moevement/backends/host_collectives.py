# SPDX-License-Identifier: Apache-2.0
"""The collectives that Megatron uses in a form that gloo lacks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_moevement.backends.host_cuda import HostBackendError


def all_gather(
    tensors: Sequence[torch.Tensor],
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Gathers tensors whose first sizes may differ, as NCCL does and gloo refuses to.

    Megatron gathers so the tokens of experts that tensor and expert parallelism share. Every rank
    of the group calls it.

    Args:
        tensors: receives the tensor of each rank, in the order of ranks.
        group: default: the whole job.
        async_op: for tensors of one size only.

    Raises:
        HostBackendError: tensors of different sizes are to be gathered asynchronously.
    """
    if all(one.shape == tensor.shape for one in tensors):
        work: dist.Work | None = dist.all_gather(list(tensors), tensor, group, async_op)
        return work
    if async_op:
        raise HostBackendError(
            "gathering tensors of different sizes asynchronously needs a GPU: "
            "the cpu backend does not stand in for it"
        )
    sizes = [len(one) for one in tensors]
    gathered = tensor.new_empty([sum(sizes), *tensor.shape[1:]])
    copies = torch.cat([tensor] * len(sizes))
    own = [len(tensor)] * len(sizes)
    dist.all_to_all_single(gathered, copies, sizes, own, group=group)
    for one, received in zip(tensors, torch.split(gathered, sizes), strict=True):
        one.copy_(received)
    return None
