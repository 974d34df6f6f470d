"""Number of parameters of a model, without allocating one."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_moevement.backends.backend import BackendName
from megatron_moevement.integrations.megatron.inventory import operator_of_parameters
from megatron_moevement.integrations.megatron.model import build_chunk
from megatron_moevement.integrations.megatron.random_state import seed_everything
from megatron_moevement.integrations.megatron.transformer_config import transformer_config
from megatron_moevement.policy.job.operators import OperatorKind
from megatron_moevement.settings.architecture import Architecture, MixtureOfExperts
from megatron_moevement.settings.parallelism import Parallelism
from megatron_moevement.settings.precision import Precision


@dataclasses.dataclass(frozen=True)
class ParameterCount:
    """Parameters of a whole model.

    Attributes:
        active: those that one token uses: of the routed experts, top-k per layer.
    """

    total: int
    active: int


def count_parameters(
    architecture: Architecture, moe: MixtureOfExperts, *, vocab_size: int, seq_length: int
) -> ParameterCount:
    """Builds the model on the meta device and counts; a process in no job calls it."""
    config = transformer_config(
        architecture, moe, Parallelism(), Precision(), backend=BackendName.CPU, deterministic=False
    )
    config.use_cpu_initialization = True  # allocates where torch's default device says
    config.perform_initialization = False
    with _alone(), torch.device("meta"):
        chunk = build_chunk(config, architecture, vocab_size=vocab_size, seq_length=seq_length)
        routed = total = 0
        for _, tensor, operator in operator_of_parameters(chunk):
            if isinstance(tensor, torch.nn.Parameter):
                total += tensor.numel()
                routed += tensor.numel() * (operator.kind is OperatorKind.EXPERT)
    idle = routed - routed * moe.moe_router_topk // (moe.num_experts or 1)
    return ParameterCount(total=total, active=total - idle)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """A job of one rank: Megatron's modules ask for their groups while they are built."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    seed_everything(1, 0)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
