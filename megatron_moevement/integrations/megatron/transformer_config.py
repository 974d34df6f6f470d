# SPDX-License-Identifier: Apache-2.0
"""The translation of our settings into Megatron's `TransformerConfig`."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import torch
from megatron.core.activations import squared_relu
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_moevement.backends.backend import BackendName
from megatron_moevement.integrations.megatron.transformer_options import TransformerOptions
from megatron_moevement.policy.job.state_recipe import NumberType
from megatron_moevement.settings.architecture import (
    Architecture,
    MixtureOfExperts,
    TransformerImpl,
)
from megatron_moevement.settings.parallelism import Parallelism
from megatron_moevement.settings.precision import Precision

Config = TransformerConfig
"""Megatron's description of a model."""


def transformer_config(
    architecture: Architecture,
    moe: MixtureOfExperts,
    transformer: TransformerOptions,
    parallelism: Parallelism,
    precision: Precision,
    *,
    backend: BackendName,
    deterministic: bool,
) -> TransformerConfig:
    """Translates the flags into Megatron's `TransformerConfig`; callbacks are set later.

    Args:
        transformer: settings that are its fields already.
    """
    options = _network_options(architecture) | _moe_options(architecture, moe)
    options |= _field_options(transformer, backend)
    options |= _fusion_options(architecture, backend)
    options |= _parallelism_options(architecture, moe, parallelism) | _precision_options(precision)
    return TransformerConfig(
        **options,
        deterministic_mode=deterministic,
        cuda_graph_scope=[],  # upstream's default warns of itself
    )


def same_names(config: type[Any], *groups: Any) -> dict[str, Any]:
    """Returns the flags that are fields of one of upstream's configurations, by the same names."""
    fields = {field.name for field in dataclasses.fields(config)}
    flags = {name: value for group in groups for name, value in vars(group).items()}
    return {name: value for name, value in flags.items() if name in fields}


def _network_options(architecture: Architecture) -> dict[str, Any]:
    options = same_names(TransformerConfig, architecture)
    options["ffn_hidden_size"] = architecture.mlp_width
    options["layernorm_epsilon"] = architecture.norm_epsilon
    options["add_bias_linear"] = not architecture.disable_bias_linear
    options["transformer_impl"] = (architecture.transformer_impl or TransformerImpl.LOCAL).value
    if not architecture.group_query_attention:
        options["num_query_groups"] = None
    if architecture.recompute_modules is not None:
        options["recompute_modules"] = list(architecture.recompute_modules)
    if architecture.swiglu:
        options |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    elif architecture.squared_relu:
        options["activation_func"] = squared_relu
    if architecture.position_embedding_type == "rope" and architecture.rotary_percent < 1.0:
        options["apply_rope_fusion"] = False
    return options


def _field_options(transformer: TransformerOptions, backend: BackendName) -> dict[str, Any]:
    options = same_names(TransformerConfig, transformer)
    options["attention_backend"] = AttnBackend[options["attention_backend"]]
    fused = {"moe_permute_fusion": True, "moe_router_fusion": True}
    fused["cross_entropy_loss_fusion"] = options["cross_entropy_fusion_impl"] == "te"
    for name, needs_transformer_engine in fused.items():  # none on the host
        options[name] &= backend is BackendName.CUDA and (
            not needs_transformer_engine or _importable("transformer_engine")
        )
    return options


def _fusion_options(architecture: Architecture, backend: BackendName) -> dict[str, bool]:
    """Returns which operations are fused: none on the host."""
    apex = _importable("apex")
    fused = {
        "bias_activation_fusion": architecture.bias_swiglu_fusion and architecture.swiglu,
        "bias_dropout_fusion": architecture.bias_dropout_fusion,
        "masked_softmax_fusion": architecture.masked_softmax_fusion
        and _importable("scaled_upper_triang_masked_softmax_cuda"),
        "apply_rope_fusion": architecture.rope_fusion
        and architecture.position_embedding_type == "rope"
        and (apex or _importable("transformer_engine")),
        "gradient_accumulation_fusion": architecture.gradient_accumulation_fusion
        and _importable("fused_weight_gradient_mlp_cuda"),
        "persist_layer_norm": architecture.persist_layer_norm
        and apex
        and architecture.normalization == "LayerNorm",
    }
    return {name: backend is BackendName.CUDA and wanted for name, wanted in fused.items()}


def _importable(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _parallelism_options(
    architecture: Architecture, moe: MixtureOfExperts, parallelism: Parallelism
) -> dict[str, Any]:
    num_layers = int(architecture.num_layers or 0)
    single_messages = parallelism.sends_single_messages(num_layers)
    options = same_names(TransformerConfig, parallelism)
    if moe.num_experts is None:
        options["expert_model_parallel_size"] = 1
    return options | {
        "virtual_pipeline_model_parallel_size": parallelism.virtual_stages(num_layers),
        "num_layers_in_first_pipeline_stage": parallelism.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": parallelism.decoder_last_pipeline_num_layers,
        "overlap_p2p_comm": single_messages,
        "batch_p2p_comm": not single_messages,
        # Upstream synchronizes the device after each batch, for torch before 2.1. The training
        # thread would wait for all copies to the host with it.
        "batch_p2p_sync": False,
    }


def _precision_options(precision: Precision) -> dict[str, Any]:
    dtype = torch_dtype(precision.compute_type)
    options = same_names(TransformerConfig, precision)
    return options | {"params_dtype": dtype, "pipeline_dtype": dtype}


def torch_dtype(number_type: NumberType) -> torch.dtype:
    """Returns torch's name of a type."""
    dtype: torch.dtype = getattr(torch, number_type.value)
    return dtype


def _moe_options(architecture: Architecture, moe: MixtureOfExperts) -> dict[str, Any]:
    if moe.num_experts is None:
        return {}
    options = same_names(TransformerConfig, moe)
    options["num_moe_experts"] = moe.num_experts
    if moe.moe_ffn_hidden_size is None:
        options["moe_ffn_hidden_size"] = architecture.mlp_width
    frequency = moe.moe_layer_freq
    options["moe_layer_freq"] = list(frequency) if isinstance(frequency, tuple) else frequency
    balancing = [kind.value for kind in moe.moe_router_load_balancing_type]
    coefficients = list(moe.moe_aux_loss_coeff)
    several = len(balancing) > 1
    options["moe_router_load_balancing_type"] = balancing if several else balancing[0]
    options["moe_aux_loss_coeff"] = coefficients if several else coefficients[0]
    return options
