# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says of its model, and where that differs from the model of a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_moevement.settings.architecture import (
    Architecture,
    LoadBalancing,
    MixtureOfExperts,
    default_mlp_width,
    layer_pattern,
)

if TYPE_CHECKING:
    from megatron_moevement.training.arguments import Arguments

NETWORK = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "group_query_attention",
    "num_query_groups",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "normalization",
    "norm_epsilon",
    "swiglu",
    "squared_relu",
    "disable_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "untie_embeddings_and_output_weights",
    "num_experts",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias",
    "rotary_interleaved",
)
"""Flags of the network that decide the shapes and the meaning of the weights."""

_SINKHORN = LoadBalancing.SINKHORN.value


def model_description(arguments: Arguments) -> dict[str, Any]:
    """Returns what decides the shapes and the meaning of the weights, for a checkpoint to keep."""
    architecture, moe = arguments.architecture, arguments.moe
    values = dataclasses.asdict(architecture) | dataclasses.asdict(moe)
    values |= dataclasses.asdict(arguments.transformer)
    longest = architecture.max_position_embeddings or arguments.data.seq_length
    return {name: values[name] for name in NETWORK} | {
        "max_position_embeddings": longest,
        "moe_router_load_balancing_type": [
            kind.value for kind in moe.moe_router_load_balancing_type
        ],
        "vocab_size": arguments.data.vocab_size,
    }


def model_differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Returns the flags in which two models differ, as `--name ours (checkpoint: theirs)`.

    What a model has no use for is not compared, nor what the checkpoint of an earlier version does
    not tell.
    """
    own, other = _effective(ours), _effective({**ours, **theirs})
    return [
        f"--{name.replace('_', '-')} {own[name]} (checkpoint: {other[name]})"
        for name in sorted(own.keys() & other.keys() & theirs.keys())
        if own[name] != other[name]
    ]


def _effective(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Fills in the defaults that depend on other flags, and leaves out what has no effect."""
    values = with_defaults(flags)
    unused = _unused(values, _layer_pattern(flags))
    return {name: value for name, value in values.items() if name not in unused}


def with_defaults(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a model is described by, with the defaults that depend on other flags."""
    heads, width = flags["num_attention_heads"], flags["hidden_size"]
    mlp_width = flags["ffn_hidden_size"] or default_mlp_width(width, is_gated=flags["swiglu"])
    pattern = _layer_pattern(flags)
    # Auxiliary losses are a matter of the training; this kind chooses experts in its own way.
    is_sinkhorn = _SINKHORN in flags.get("moe_router_load_balancing_type", ())
    return {
        **flags,
        "ffn_hidden_size": mlp_width,
        "kv_channels": flags["kv_channels"] or width // heads,
        "num_query_groups": flags["num_query_groups"] if flags["group_query_attention"] else heads,
        "num_experts": flags["num_experts"] if any(pattern) else None,
        "moe_layer_freq": [int(is_moe) for is_moe in pattern],
        "moe_ffn_hidden_size": flags["moe_ffn_hidden_size"] or mlp_width,
        "moe_router_topk_scaling_factor": flags["moe_router_topk_scaling_factor"] or 1.0,
        "moe_router_load_balancing_type": _SINKHORN if is_sinkhorn else f"no {_SINKHORN}",
    }


def _unused(values: Mapping[str, Any], pattern: tuple[bool, ...]) -> set[str]:
    """Returns the flags without effect; what makes them so is compared itself."""
    unused = {"group_query_attention"}
    if not values["disable_bias_linear"]:
        unused |= {"add_qkv_bias"}
    if values["position_embedding_type"] != "rope":
        unused |= {"rotary_base", "rotary_percent", "rotary_interleaved"}
    if values["position_embedding_type"] != "learned_absolute":
        unused |= {"max_position_embeddings"}
    if values["moe_router_score_function"] != "softmax":
        unused |= {"moe_router_pre_softmax"}
    if all(pattern):
        unused |= {"ffn_hidden_size"}
    if not any(pattern):
        unused |= {name for name in values if name.startswith("moe_")} - {"moe_layer_freq"}
    return unused


def _layer_pattern(flags: Mapping[str, Any]) -> tuple[bool, ...]:
    frequency = flags["moe_layer_freq"]
    return layer_pattern(
        Architecture(num_layers=flags["num_layers"]),
        MixtureOfExperts(
            num_experts=flags["num_experts"],
            moe_layer_freq=frequency if isinstance(frequency, int) else tuple(frequency),
        ),
    )
