# SPDX-License-Identifier: Apache-2.0
"""Numbers over all that the optimizers of a job train, for logging; they decide no bit of it.

Both are sums over the same parameters and the same groups as the norm of the gradients: of each
chained optimizer the model-parallel ranks, with the distributed optimizer all ranks, whose shards
together are the whole. So whoever can compute that norm in a step can compute them, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared


def count_zeros(parts: Sequence[MegatronOptimizer], device: torch.device) -> int:
    """Returns how many elements of the prepared gradients are zero; every rank calls it.

    Source: `count_zeros_fp32` of megatron/core/optimizer/clip_grads.py, which adds in FP32: beyond
    2**24 zeros that is no exact number.
    """
    total = 0
    for part in parts:
        own = torch.zeros(1, dtype=torch.int64, device=device)
        for weight in _counted(part):
            if weight.grad is not None:
                own += weight.grad.numel() - torch.count_nonzero(weight.grad)
        dist.all_reduce(own, group=part.get_grad_stats_parallel_group())
        total += int(own.item())
    return total


def parameters_norm(parts: Sequence[MegatronOptimizer], device: torch.device) -> float:
    """Returns the L2 norm of all master weights; every rank calls it.

    Source: `calc_params_l2_norm` of megatron/training/utils.py, which takes the experts' compute
    weights instead, and so with an overlapped gather those of the step before.
    """
    total = 0.0
    for part in parts:
        own = torch.zeros(1, dtype=torch.float64, device=device)
        for weight in _counted(part):
            own += torch.linalg.vector_norm(weight.detach().float()).double().square()
        dist.all_reduce(own, group=part.get_grad_stats_parallel_group())
        total += float(own.item())
    return math.sqrt(total)


def _counted(part: MegatronOptimizer) -> Iterator[torch.Tensor]:
    """Yields the master weights that this rank answers for: none is counted on two ranks."""
    group = getattr(part, "tp_group", None)
    for weight in part.get_parameters():
        if param_is_not_shared(weight) and param_is_not_tensor_parallel_duplicate(weight, group):
            yield weight
