# SPDX-License-Identifier: Apache-2.0
"""The GPT MoE model: layer specs, model chunks, and their wrapping for precision and replicas."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from enum import Enum

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_moevement.integrations.megatron.grouped_experts import (
    GroupedExperts,
    ascending_in_buffers,
)
from megatron_moevement.integrations.megatron.norms import SequenceParallelNorm
from megatron_moevement.integrations.megatron.transformer_config import same_names
from megatron_moevement.settings.architecture import Architecture
from megatron_moevement.settings.parallelism import Parallelism
from megatron_moevement.settings.precision import Precision

Chunks = Sequence[DistributedDataParallel]
"""The model chunks of one rank: several with interleaving, else one."""


class Building(Enum):
    """Who builds a model at the same time."""

    TOGETHER = "together"
    """All ranks of the job; they make their weights agree."""

    ALONE = "alone"
    """This rank; no collective is made, and the state is put in later."""


class _LoneGPTModel(GPTModel):  # type: ignore[misc]  # upstream is not typed
    """A model whose tied embedding is not compared with the other end stage's when it is built."""

    def _is_in_embd_group(self) -> bool:
        """Is asked by upstream's constructor only, before the all-reduce of tied embeddings."""
        return False


def layer_specs(
    config: TransformerConfig, architecture: Architecture, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Returns the layers of one model chunk of this rank."""
    local = architecture.is_local
    grouped = local and config.moe_grouped_gemm
    if grouped:  # upstream's local grouped experts are one parameter for all; ours are built below
        config = copy.copy(config)
        config.moe_grouped_gemm = False
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=not local,
        normalization=architecture.normalization,
        vp_stage=vp_stage,
    )
    if local:
        for layer in block.layer_specs:
            _use_own_modules(layer, grouped=grouped)
        if block.layer_norm is WrappedTorchNorm:
            block.layer_norm = SequenceParallelNorm
    return block


def _use_own_modules(spec: ModuleSpec, *, grouped: bool) -> None:
    """Puts our norms and grouped experts where upstream's local modules stand, recursively."""
    submodules = spec.submodules
    if submodules is None:
        return
    for name, value in vars(submodules).items():
        if value is WrappedTorchNorm:
            setattr(submodules, name, SequenceParallelNorm)
        elif isinstance(value, ModuleSpec):
            if grouped and value.module is SequentialMLP:
                value.module = GroupedExperts
            _use_own_modules(value, grouped=grouped)


def build_chunk(
    config: TransformerConfig,
    architecture: Architecture,
    *,
    vocab_size: int,
    seq_length: int,
    groups: ProcessGroupCollection | None = None,
    vp_stage: int | None = None,
    pre_process: bool = True,
    post_process: bool = True,
    building: Building = Building.TOGETHER,
) -> GPTModel:
    """Builds one model chunk, with FP32 or low-precision weights as the config says.

    Args:
        vocab_size: padded size of the vocabulary.
        groups: the process groups; None takes those of `parallel_state`.
        vp_stage: index of the chunk on this rank, None without interleaving.
    """
    model_type = GPTModel if building is Building.TOGETHER else _LoneGPTModel
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*not installed.*")
        return model_type(
            config=config,
            transformer_layer_spec=layer_specs(config, architecture, vp_stage),
            vocab_size=vocab_size,
            max_sequence_length=architecture.max_position_embeddings or seq_length,
            pre_process=pre_process,
            post_process=post_process,
            parallel_output=True,
            share_embeddings_and_output_weights=(
                not architecture.untie_embeddings_and_output_weights
            ),
            position_embedding_type=architecture.position_embedding_type,
            rotary_percent=architecture.rotary_percent,
            rotary_base=architecture.rotary_base,
            pg_collection=groups,
            vp_stage=vp_stage,
        )


def build_model(
    config: TransformerConfig,
    architecture: Architecture,
    parallelism: Parallelism,
    precision: Precision,
    groups: ProcessGroupCollection,
    *,
    vocab_size: int,
    seq_length: int,
    device: torch.device,
    building: Building = Building.TOGETHER,
) -> list[DistributedDataParallel]:
    """Builds this rank's model chunks, wrapped for precision and data parallelism."""
    chunks: list[MegatronModule] = []
    stages = parallelism.virtual_stages(config.num_layers)
    for stage in range(stages) if stages else (None,):
        ends = {"ignore_virtual": False, "vp_stage": stage}
        chunk = build_chunk(
            config,
            architecture,
            vocab_size=vocab_size,
            seq_length=seq_length,
            groups=groups,
            vp_stage=stage,
            pre_process=parallel_state.is_pipeline_first_stage(**ends),
            post_process=parallel_state.is_pipeline_last_stage(**ends),
            building=building,
        )
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        if config.expert_tensor_parallel_size != config.tensor_model_parallel_size:
            _reduce_experts_in_their_group(chunk)
        chunk.to(device)
        chunks.append(Float16Module(config, chunk) if config.fp16 or config.bf16 else chunk)
    for chunk in chunks:
        keep_expert_bias_in_fp32(chunk)
        if not parallelism.use_distributed_optimizer:  # which lays out parameters itself
            _lay_out_experts(chunk)
    with ascending_in_buffers(chunks):
        wrapped = _wrap_for_data_parallel(chunks, config, parallelism, precision, groups)
    if building is Building.TOGETHER:
        for chunk in wrapped:
            chunk.broadcast_params()
    return wrapped


def let_go(chunks: Chunks) -> None:
    """Empties chunks that nobody uses any more, so that their memory can be freed.

    Hooks of theirs hang on nodes of autograd, through which Python's collector sees no cycle; and a
    token dispatcher keeps the graph of the newest micro-batch.
    """
    for chunk in chunks:
        vars(chunk).clear()


def _lay_out_experts(chunk: MegatronModule) -> None:
    for experts in chunk.modules():
        if isinstance(experts, GroupedExperts):
            experts.lay_out()


def _reduce_experts_in_their_group(chunk: MegatronModule) -> None:
    """Makes gradients and optimizer of the experts use the group of ranks that hold the same ones.

    Upstream does so with expert-parallel ranks alone. Without any, experts that are cut into fewer
    pieces than the dense part have replicas among tensor peers, which would train apart.
    """
    for layer in chunk.modules():
        if isinstance(layer, MoELayer):
            for parameter in layer.experts.parameters():
                parameter.allreduce = False


def keep_expert_bias_in_fp32(module: torch.nn.Module) -> None:
    """Gives every router's `expert_bias` back its FP32.

    `Float16Module` casts it; upstream restores it in the first forward pass only, too late for a
    checkpoint that is loaded before, and for a snapshot, which would hold the replaced buffer.
    """
    for router in module.modules():
        if isinstance(router, TopKRouter):
            router._maintain_float32_expert_bias()  # noqa: SLF001  (upstream has no public name)


def _wrap_for_data_parallel(
    chunks: list[MegatronModule],
    config: TransformerConfig,
    parallelism: Parallelism,
    precision: Precision,
    groups: ProcessGroupCollection,
) -> list[DistributedDataParallel]:
    bucket_size = parallelism.ddp_bucket_size
    if bucket_size is None:  # upstream's default, megatron/training/training.py
        replicas = groups.dp_cp.size()
        bucket_size = max(40_000_000, 1_000_000 * replicas)
    ddp_config = DistributedDataParallelConfig(
        **same_names(DistributedDataParallelConfig, parallelism),
        grad_reduce_in_fp32=precision.reduces_in_fp32,
        bucket_size=bucket_size if parallelism.overlap_grad_reduce else None,
    )
    return [
        DistributedDataParallel(
            config=config,
            ddp_config=ddp_config,
            module=chunk,
            disable_bucketing=index > 0,  # later chunks reduce while the first still computes
            pg_collection=groups,
        )
        for index, chunk in enumerate(chunks)
    ]
