# SPDX-License-Identifier: Apache-2.0
"""How many parameters a model has that is spread over the ranks of a job."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import unwrap_model

from megatron_moevement.integrations.megatron.inventory import operator_of_parameters
from megatron_moevement.integrations.megatron.process_groups import Groups
from megatron_moevement.policy.job.operators import OperatorKind
from megatron_moevement.runtime.interrupts.host_wait import await_on_host


def count_parameters(
    chunks: Sequence[DistributedDataParallel], groups: Groups, device: torch.device
) -> tuple[int, int]:
    """Returns the parameters of the whole model, and those of them in routed experts.

    Every rank calls it, in step. Each parameter is counted on one of the ranks that hold it.
    """
    total = routed = 0
    for chunk in unwrap_model(list(chunks)):
        for _, tensor, operator in operator_of_parameters(chunk):
            is_routed = operator.kind is OperatorKind.EXPERT
            replicas, split = groups.dp_cp, groups.tp
            if is_routed:
                replicas, split = groups.expt_dp, groups.expt_tp
            if (
                isinstance(tensor, torch.nn.Parameter)
                and replicas.rank() == 0
                and param_is_not_shared(tensor)
                and param_is_not_tensor_parallel_duplicate(tensor, split)
            ):
                total += tensor.numel()
                routed += tensor.numel() * is_routed
    counts = torch.tensor([total, routed], dtype=torch.int64, device=device)
    await_on_host(dist.all_reduce(counts, async_op=True))
    total, routed = counts.tolist()
    return total, routed
